"""Returns freed memory to the system while a model is loaded. It knows no weights.

The C library keeps memory between live buffers: after hundreds of weights or some logits of a whole vocabulary, several
times their size.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of the C library's `mallopt`."""
_LARGE_BYTES = 128 << 10
_USUAL_BYTES = 32 << 20
"""Upper limit of glibc's own threshold, which it reaches once buffers of that size have been freed."""


def give_back() -> None:
    """Return freed memory to the system if the C library supports it."""
    trim = _find("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def large_buffers_returned() -> Iterator[None]:
    """Within it, buffers of 128 KiB or more are separate mappings, which end when they are freed. Afterwards they come
    from the C library's own memory again, since a mapping for each forward takes time."""
    _set_thresholds(_LARGE_BYTES, 2 * _LARGE_BYTES)
    try:
        yield
    finally:
        give_back()
        _set_thresholds(_USUAL_BYTES, 2 * _USUAL_BYTES)


def _set_thresholds(mapped_bytes: int, trimmed_bytes: int) -> None:
    """Sizes from which on a buffer is a mapping, and free memory at the end of the heap is returned."""
    set_option = _find("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, mapped_bytes)
        set_option(_TRIM_THRESHOLD, trimmed_bytes)


@lru_cache
def _find(name: str) -> Any:
    """A function of the C library; None if it has no such function."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # no library of the process itself to open
        return None
