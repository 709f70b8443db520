"""The sum of every row, in an order that the row's length alone decides: what means and norms of a model need.

Torch's own reductions on a GPU change their order with the number of rows. It does not know what is summed.
"""

from collections.abc import Callable

from torch import Tensor

from betoken.kernels import checks, dispatch
from betoken.kernels.row_sum import reference

__all__ = ["row_sum"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.row_sum,
    "triton": dispatch.triton("betoken.kernels.row_sum.kernel", "row_sum"),
}


def row_sum(x: Tensor) -> Tensor:
    """Add up each row in float32.

    Args:
        x: [R, K] bfloat16, float16 or float32, contiguous, R and K at least 1.

    Returns:
        [R] float32; entry r depends on row r only, to the last bit.

    Raises:
        ValueError: a shape, stride or dtype other than above.
    """
    checks.check_rows(x)
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(x)
