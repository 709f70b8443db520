"""Triton's `dot` under the interpreter with every output as one sum in a fixed order, whatever the machine.

The interpreter asks NumPy's BLAS, whose order of sums depends on processor and number of rows. A device
adds the terms of all rows in one order, and that is what the tests ask equal bits of. It does not know the kernels.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from triton.runtime import interpreter


def product(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`a @ b` for [..., M, K] and [..., K, N]: each output's terms in `dtype`, added from the first to the last."""
    a, b = a.astype(dtype), b.astype(dtype)
    out = np.zeros(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        out += a[..., :, k, None] * b[..., None, k, :]
    return out


def install() -> None:
    """Let the interpreter multiply so from now on."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if any(part.dtype.is_floating() and part.dtype.primitive_bitwidth == 8 for part in (a, b)):
            raise NotImplementedError("our kernels do not multiply 8-bit numbers")
        return interpreter.TensorHandle(product(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
