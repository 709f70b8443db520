"""A linear layer whose weight keeps its checkpoint's few bits: dequantised tile by tile, once for all rows.

Row r has the same result for any number of rows. It does not know formats or models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.kernels import checks, dispatch
from betoken.kernels.linear_grouped import reference
from betoken.kernels.linear_grouped.weight import Grouped, Weight, in_order

__all__ = ["Grouped", "Weight", "linear_grouped"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.linear_grouped,
    "triton": dispatch.triton("betoken.kernels.linear_grouped.kernel", "linear_grouped"),
}


def linear_grouped(
    x: Tensor, weight: Grouped, bias: Tensor | None = None, *, keeps_sums: bool = False, whole_outputs: int = 0
) -> Tensor:
    """y = x W^T + b with float32 products and sums, rounded once at the end.

    The CPU kernel takes packed weights and is an operator of `betoken.kernels.cpu`.

    Args:
        x: [R, K] bfloat16, float16 or float32, contiguous, R and K at least 1.
        weight: [N, K].
        bias: [N], contiguous, dtype of `x`.
        keeps_sums: leave the float32 sums as they are.
        whole_outputs: outputs of the layer of which `weight` is a part, whose order of summation it keeps; 0 = N.

    Returns:
        [R, N], dtype of `x`, or float32 with `keeps_sums`. Row r depends on row r of `x`, `weight` and `bias` only, to
        the last bit.

    Raises:
        ValueError: a shape, stride, dtype or device other than above.
    """
    checks.check_rows(x)
    num_outputs, num_inputs = weight.shape
    if num_inputs != x.shape[1] or weight.values.device != x.device:
        raise ValueError(
            f"weight must be [N, {x.shape[1]}] on {x.device}, got {[num_outputs, num_inputs]} on {weight.values.device}"
        )
    if bias is not None:
        checks.check_column("bias", bias, num_outputs, x.dtype, x.device)
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(*in_order(x, weight), bias, torch.float32 if keeps_sums else x.dtype, whole_outputs)
