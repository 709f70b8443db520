"""The sum of every row, in an order that the row's length alone decides: what means and norms of a model need.

Torch's own reductions on a GPU change their order with the number of rows. It does not know what is summed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.kernels import dispatch
from foretoken.kernels.row_sum import reference

__all__ = ["row_sum"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.row_sum,
    "triton": dispatch.triton("foretoken.kernels.row_sum.kernel", "row_sum"),
}

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row_sum(x: Tensor) -> Tensor:
    """Add up each row in float32.

    Args:
        x: [R, K] bfloat16, float16 or float32, contiguous, R and K at least 1.

    Returns:
        [R] float32; entry r depends on row r only, to the last bit.

    Raises:
        ValueError: a shape, stride or dtype other than above.
    """
    if x.dim() != 2 or x.dtype not in _DTYPES or not x.is_contiguous() or 0 in x.shape:
        raise ValueError(
            f"x must be contiguous [R, K] bfloat16, float16 or float32, at least [1, 1],"
            f" got {list(x.shape)} {x.dtype} with strides {list(x.stride())}"
        )
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(x)
