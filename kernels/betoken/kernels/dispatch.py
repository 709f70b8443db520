"""Which implementation of an op runs: by device, with one override for all ops.

Ops pass a table {path name: implementation} that holds at least "reference". "native" is the C library and falls back
to "reference" where building fails; "triton" is loaded at its first call. An import probes nothing, and the environment
is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, TypeVar

import torch

from betoken.kernels import native

PathName = Literal["reference", "native", "triton"]
Implementation = TypeVar("Implementation", bound=Callable[..., Any])

# Fastest first; an op that lacks one falls through to the next.
_PREFERENCE: dict[str, tuple[PathName, ...]] = {"cpu": ("native", "reference"), "cuda": ("triton", "reference")}
_override: PathName | None = None
_taken: list[PathName] | None = None


def triton(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that is imported at the first call: the CPU path never loads Triton."""

    def call(*args: Any, **keywords: Any) -> Any:
        return getattr(import_module(module), name)(*args, **keywords)

    return call


@contextmanager
def override(path: PathName) -> Iterator[None]:
    """Makes every op that has `path` use it until the block ends, in all threads; for tests and for comparisons."""
    global _override
    previous, _override = _override, path
    try:
        yield
    finally:
        _override = previous


@contextmanager
def recording() -> Iterator[list[PathName]]:
    """Collects the path of every op that runs until the block ends, in all threads; for tests."""
    global _taken
    previous, _taken = _taken, []
    try:
        yield _taken
    finally:
        _taken = previous


def select(device: torch.device, table: Mapping[PathName, Implementation]) -> tuple[PathName, Implementation]:
    """The path to take on a device, and its implementation."""
    path = _path(device, table)
    if _taken is not None:
        _taken.append(path)
    return path, table[path]


def compiles_at_first_call(device: torch.device) -> bool:
    """Whether ops on a device run in Triton, which compiles a kernel when it is first called."""
    return "triton" in _PREFERENCE.get(device.type, ())


def _path(device: torch.device, table: Mapping[PathName, Implementation]) -> PathName:
    if _override is not None and _override in table:
        return _override
    for path in _PREFERENCE.get(device.type, ()):
        if path in table and (path != "native" or native.is_available()):
            return path
    return "reference"
