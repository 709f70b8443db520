"""A linear layer whose rows do not depend on each other: what row r gives is the same for any number of rows.

The GPU's stock product picks its algorithm, and with it the order of the sum, by the number of rows. This one fixes the
order by the weight's shape alone. It does not know models or batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.kernels import dispatch
from foretoken.kernels.linear import reference

__all__ = ["LINEAR_DTYPES", "linear"]

LINEAR_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.linear,
    "triton": dispatch.triton("foretoken.kernels.linear.kernel", "linear"),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b with float32 products and sums, rounded once at the end.

    Args:
        x: [R, K] bfloat16, float16 or float32, contiguous, R and K at least 1.
        weight: [N, K], contiguous, dtype of `x`.
        bias: [N], contiguous, dtype of `x`.

    Returns:
        [R, N], dtype of `x`. Row r depends on row r of `x`, `weight` and `bias` only, to the last bit.

    Raises:
        ValueError: a shape, stride, dtype or device other than above.
    """
    if x.dim() != 2 or x.dtype not in LINEAR_DTYPES or not x.is_contiguous() or 0 in x.shape:
        raise ValueError(
            f"x must be contiguous [R, K] bfloat16, float16 or float32, at least [1, 1],"
            f" got {list(x.shape)} {x.dtype} with strides {list(x.stride())}"
        )
    _check("weight", weight, x, (weight.shape[0] if weight.dim() == 2 else -1, x.shape[1]))
    if bias is not None:
        _check("bias", bias, x, (weight.shape[0],))
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(x, weight, bias)


def _check(name: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != x.dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {list(shape)} {x.dtype}, got {list(tensor.shape)} {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")
