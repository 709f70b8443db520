"""The variants of Triton kernels that calls would compile by Triton's own rules, without a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from betoken.kernels import dispatch

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@contextmanager
def recorded_variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Collects (kernel, what its code was made for) of every launch in the block; nothing runs, new tensors hold 0."""
    variants: set[tuple[str, str]] = set()
    binders: dict[JITFunction, Any] = {}

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        if kernel not in binders:
            binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, _BACKEND)
        _, specialization, options = binders[kernel](*args, **keywords)
        named = dict(zip(kernel.arg_names, specialization, strict=True))
        variants.add((kernel.__name__, f"{named} {options}"))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setitem(dispatch._PREFERENCE, "cpu", dispatch._PREFERENCE["cuda"])
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _zeroed(getattr(owner, name)))
        yield variants


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **keywords: make(*args, **keywords).zero_()
