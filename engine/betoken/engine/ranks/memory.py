"""Memory that the ranks of one machine share: counts of their exchanges, and room for gathers.

Rank 0 creates it as a file without a name; a process that it starts finds the file by an environment variable.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import IO

import numpy as np

from betoken.kernels import shared_gather

FILE_VARIABLE = "BETOKEN_RANK_MEMORY_FD"


class RankMemory:
    """The memory of `size` ranks."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        """`file`: made by `create`, here or in the process that started this one."""
        self.file = file
        length = shared_gather.num_bytes(size)
        self._map = mmap.mmap(file.fileno(), length + 8 * size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.counts = np.frombuffer(self._map, np.int64, offset=length)
        """Exchanges of each rank [size]: see `RankGroup`."""

    @classmethod
    def create(cls, size: int) -> RankMemory:
        """Create the memory, zero at first."""
        if hasattr(os, "memfd_create"):
            file: IO[bytes] = os.fdopen(os.memfd_create("betoken-ranks"), "r+b")
        else:
            file = tempfile.TemporaryFile()
        file.truncate(shared_gather.num_bytes(size) + 8 * size)
        return cls(file, size)

    @classmethod
    def in_environment(cls, size: int) -> RankMemory | None:
        """Return the memory that rank 0 shares with a process it started; None in other processes."""
        number = os.environ.get(FILE_VARIABLE)
        return None if number is None else cls(os.fdopen(int(number), "r+b"), size)

    def gather(self, first: int, rank: int, size: int) -> shared_gather.SharedGather:
        """Return place `rank` of the `size` ranks from `first` on. It is valid as long as `counts` or a part of it
        exists, which keeps the memory mapped.

        Raises:
            BuildError, OSError: the code cannot be compiled.
        """
        return shared_gather.SharedGather(self._address + shared_gather.num_bytes(first), rank, size)
