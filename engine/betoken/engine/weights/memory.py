"""Gives freed memory back to the system while a model is loaded. It knows no weights.

The C library keeps memory between live buffers: after hundreds of weights, several times what they take.
"""

import ctypes
from functools import lru_cache
from typing import Any


def give_back() -> None:
    """Do so if the C library supports it."""
    trim = _trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no library of the process itself to open
        return None
