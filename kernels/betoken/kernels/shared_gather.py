"""Gathers of tensors between the processes of one machine, by copies in memory that they map.

Every process has two slots, used in turn, and a count of its gathers. It copies its tensor into a slot, counts, and
takes the tensors of the others once they have counted. A process can overwrite a slot only two gathers later, when all
others have counted, and so have read it. Compiled on first use.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from betoken.kernels.build import BuildError, Library, build

_LOG = logging.getLogger(__name__)

SLOT_BYTES = 1 << 20
"""Longest tensor of a process, bytes."""
_COUNT_BYTES = 64
_TIMEOUT_NS = 100_000_000

LIBRARY = Library(
    name="shared-gather",
    source=Path(__file__).with_suffix(".c"),
    headers=(),
    compiler_variable="CC",
    compilers=("cc", "gcc", "clang"),
)


def num_bytes(size: int) -> int:
    """Return the length of the memory of `size` processes, which is zero at first."""
    return size * (_COUNT_BYTES + 2 * SLOT_BYTES)


class SharedGather:
    """Place `rank` of `size` processes. All make the same gathers in the same order."""

    def __init__(self, address: int, rank: int, size: int) -> None:
        """`address`: of the memory, aligned to 64 bytes.

        Raises:
            BuildError, OSError: the library cannot be compiled.
        """
        self._function = _load()
        self._counts, self._slots = address, address + size * _COUNT_BYTES
        self._rank, self._size = rank, size
        self._turn = 0

    def begin(self) -> None:
        """Begin the next gather."""
        self._turn += 1

    def try_gather(self, source: torch.Tensor, out: torch.Tensor) -> bool:
        """Gather contiguous tensors of at most `SLOT_BYTES` bytes [...] into `out` [size, ...]; False if a process has
        not come within a tenth of a second. The call is then repeated."""
        return not self._function(
            *(self._slots, SLOT_BYTES, self._counts, self._rank, self._size, self._turn),
            *(source.data_ptr(), source.nbytes, out.data_ptr(), _TIMEOUT_NS),
        )


@lru_cache(maxsize=1)
def _load() -> Any:
    function = ctypes.CDLL(str(build(LIBRARY))).betoken_shared_gather
    pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [pointer, number, pointer, integer, integer, number, pointer, number, pointer, number]
    return function


def is_available() -> bool:
    """Whether the library can be compiled here; one warning if not."""
    try:
        _load()
    except (BuildError, OSError) as error:
        _LOG.warning("ranks exchange tensors by gloo: %s", error)
        return False
    return True
