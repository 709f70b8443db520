"""Which implementation of an op runs: by device, with one override for all ops.

Ops pass a table {path name: implementation} that holds at least "reference". Nothing is probed at import, and the
environment is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

PathName = Literal["reference", "native", "triton"]
Implementation = TypeVar("Implementation", bound=Callable[..., Any])

# Fastest first; an op that lacks one falls through to the next.
_PREFERENCE: dict[str, tuple[PathName, ...]] = {"cpu": ("native", "reference"), "cuda": ("triton", "reference")}
_override: PathName | None = None


@contextmanager
def override(path: PathName) -> Iterator[None]:
    """Makes every op that has `path` use it until the block ends; for tests and for a service's own switch."""
    global _override
    previous, _override = _override, path
    try:
        yield
    finally:
        _override = previous


def select(device: torch.device, table: Mapping[PathName, Implementation]) -> tuple[PathName, Implementation]:
    """The path to take on a device, and its implementation.

    Raises:
        ValueError: the override names a path this op does not have.
    """
    if _override is not None:
        if _override not in table:
            raise ValueError(f"this op has no path {_override!r}; it has {sorted(table)}")
        return _override, table[_override]
    for path in _PREFERENCE.get(device.type, ("reference",)):
        if path in table:
            return path, table[path]
    return "reference", table["reference"]
