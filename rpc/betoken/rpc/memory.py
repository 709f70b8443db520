"""Gives memory that large requests have left free back to the system, which glibc does late or never.

Knows this process's size only.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)
_STATM = Path("/proc/self/statm")
_PERIOD_S = 2.0
_GROWTH_BYTES = 32 << 20
"""Growth since the last trim that triggers the next one: a trim blocks allocations for some milliseconds."""


async def keep_trimming(period_s: float = _PERIOD_S) -> None:
    """Trim whenever the process has grown much, until cancelled; return if that is not supported."""
    trim = _trimmer()
    if trim is None:
        return
    trimmed_bytes = resident_bytes()
    while True:
        await asyncio.sleep(period_s)
        before = resident_bytes()
        if before - trimmed_bytes > _GROWTH_BYTES:
            await asyncio.to_thread(trim)
            trimmed_bytes = resident_bytes()
            _log.debug("trimmed from %d to %d MiB", before >> 20, trimmed_bytes >> 20)
        trimmed_bytes = min(trimmed_bytes, before)


def resident_bytes() -> int:
    """Memory of this process that is in use, bytes. Linux only."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def other_bytes(known_bytes: int) -> int:
    """Memory of this process in addition to `known_bytes`; 0 if the system does not report it."""
    return max(0, resident_bytes() - known_bytes) if _STATM.exists() else 0


def _trimmer() -> Callable[[], object] | None:
    """glibc's `malloc_trim(0)`, after what errors and their tracebacks keep in circles is gone; None without glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or another system
        return None
    return (lambda: (gc.collect(), trim(0))) if _STATM.exists() else None
