"""Which implementation of an op runs: by device, with one override for all ops.

Ops pass a table {path name: implementation} that holds at least "reference". "native" is the C library and falls back
to "reference" where it cannot be built. Nothing is probed at import, and the environment is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from foretoken.kernels import native

PathName = Literal["reference", "native", "triton"]
Implementation = TypeVar("Implementation", bound=Callable[..., Any])

# Fastest first; an op that lacks one falls through to the next.
_PREFERENCE: dict[str, tuple[PathName, ...]] = {"cpu": ("native", "reference"), "cuda": ("triton", "reference")}
_override: PathName | None = None


@contextmanager
def override(path: PathName) -> Iterator[None]:
    """Makes every op that has `path` use it until the block ends, in all threads; for tests and for comparisons."""
    global _override
    previous, _override = _override, path
    try:
        yield
    finally:
        _override = previous


def select(device: torch.device, table: Mapping[PathName, Implementation]) -> tuple[PathName, Implementation]:
    """The path to take on a device, and its implementation."""
    if _override is not None and _override in table:
        return _override, table[_override]
    for path in _PREFERENCE.get(device.type, ()):
        if path in table and (path != "native" or native.is_available()):
            return path, table[path]
    return "reference", table["reference"]
