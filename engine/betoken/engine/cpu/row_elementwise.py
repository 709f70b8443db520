"""Elementwise functions with independent rows, in eager forwards on a CPU.

Torch takes numbers in whole vectors, and the last few of a tensor one by one, by scalar code that rounds some functions
otherwise. If a row does not fill vectors (a gate of one number, the scores of eight chosen experts), the last rows'
bits would depend on the number of rows. Compiled forwards mask the last vector instead.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN: Any = torch.ops.aten
_FUNCTIONS = {
    _ATEN.elu.default,
    _ATEN.exp2.default,
    _ATEN.gelu.default,
    _ATEN.mish.default,
    _ATEN.rsqrt.default,
    _ATEN.sigmoid.default,
    _ATEN.silu.default,
    _ATEN.sinh.default,
    _ATEN.softplus.default,
}
"""Functions of models whose last numbers were found to differ (torch 2.13, float32, bfloat16, float16)."""
_IN_PLACE = {
    _ATEN.elu_.default: _ATEN.elu.default,
    _ATEN.gelu_.default: _ATEN.gelu.default,
    _ATEN.mish_.default: _ATEN.mish.default,
    _ATEN.sigmoid_.default: _ATEN.sigmoid.default,
    _ATEN.silu_.default: _ATEN.silu.default,
}
_WHOLE = 64
"""Numbers that fill vectors on any processor: two of 512 bits are taken at a time, of 16 bits each."""


class WholeVectors(TorchDispatchMode):
    """Lengthens what such a function is given so that only the addition is taken one by one.

    It holds on one thread: threads split a tensor within vectors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_needed = False
        """Whether it met rows that do not fill vectors."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _FUNCTIONS and self._is_uneven(func, args[0]):
            return _lengthened(func, *args, **keywords)
        if func in _IN_PLACE and self._is_uneven(func, args[0]):
            return args[0].copy_(_lengthened(_IN_PLACE[func], *args, **keywords))
        return func(*args, **keywords)

    def _is_uneven(self, func: Any, x: Tensor) -> bool:
        if x.dim() == 0 or x.shape[-1] % _WHOLE == 0:
            return False
        if func is _ATEN.rsqrt.default and x.dtype == torch.float32:  # each norm's; exact either way
            return False
        self.is_needed = True
        return True


def _lengthened(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    flat = x.reshape(-1)
    out: Tensor = func(functional.pad(flat, (0, -len(flat) % _WHOLE)), *args, **kwargs)
    return out[: len(flat)].reshape(x.shape)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's own operators on the calling thread alone; the CPU kernels keep their threads.

    Torch divides elements among threads wherever that falls. The last elements of a part's vector go through scalar
    code that rounds `silu` and `gelu` otherwise: a row's bits would depend on the number of rows.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def whole_rows() -> Iterator[None]:
    """Eager functions of which each row's result depends on that row alone: whole vectors, on one thread."""
    with one_torch_thread(), WholeVectors():
        yield
