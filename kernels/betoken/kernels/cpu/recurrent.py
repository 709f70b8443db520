"""The CPU kernels over recurrent states: a separate library, loaded by the first model that has states."""

import ctypes
from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from betoken.kernels.cpu import load_cpu_kernels


class RecurrentKernels:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._begin = library.betoken_begin_states
        self._begin.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
        library.betoken_state_cache_destroy.argtypes = [ctypes.c_void_p]

    def create_cache(self, layers: Sequence[Sequence[Tensor]]) -> "StateCache":
        """Make the states of layers 0, 1, ... known: a ring, then a `RecurrentPool`'s four tensors; empty for none."""
        return StateCache(self._library, self._begin, layers)


class StateCache:
    """A model's states as the kernels see them."""

    def __init__(self, library: ctypes.CDLL, begin: "ctypes._FuncPointer", layers: Sequence[Sequence[Tensor]]) -> None:
        self._library = library
        self._begin = begin
        self._handle: int | None = torch.ops.betoken.make_state_cache([tensor for layer in layers for tensor in layer])

    def begin_step(
        self,
        layout: npt.NDArray[np.int32],
        columns: npt.NDArray[np.int32],
        num_rows: int,
        num_segments: int,
        has_trees: bool,
    ) -> None:
        """Let this thread's next `state_conv` and `recur` operators run over a batch, until the next call.

        Args:
            layout: as for `CpuCache.begin_step`. columns: states, applied, first_slots and committed of `StateRows`,
                one after the other. The caller keeps both alive through the step.
        """
        self._begin(self._handle, layout.ctypes.data, columns.ctypes.data, num_rows, num_segments, has_trees)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._library.betoken_state_cache_destroy(handle)


_loaded: RecurrentKernels | None = None
_lock = Lock()


def load_recurrent_kernels() -> RecurrentKernels | None:
    """The kernels, compiled on first use; None if the CPU kernels cannot be built.

    Raises:
        BuildError, OSError: these alone cannot be built.
    """
    global _loaded
    kernels = load_cpu_kernels()
    if kernels is None:
        return None
    with _lock:
        if _loaded is None:
            _loaded = RecurrentKernels(kernels.load_recurrent())
        return _loaded
