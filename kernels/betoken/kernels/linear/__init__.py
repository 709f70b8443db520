"""A linear layer with independent rows: row r has the same result for any number of rows.

The GPU's stock product picks its algorithm, and with it the order of the sum, by the number of rows. This one fixes the
order by the weight's shape alone. It does not know models or batches.
"""

from collections.abc import Callable

from torch import Tensor

from betoken.kernels import checks, dispatch
from betoken.kernels.linear import reference

__all__ = ["linear"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.linear,
    "triton": dispatch.triton("betoken.kernels.linear.kernel", "linear"),
}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_sums: bool = False, whole_outputs: int = 0
) -> Tensor:
    """y = x W^T + b with float32 products and sums, rounded once at the end or not at all.

    Args:
        x: [R, K] bfloat16, float16 or float32, contiguous, R and K at least 1.
        weight: [N, K], contiguous, dtype of `x`.
        bias: [N], contiguous, dtype of `x`.
        keeps_sums: the result is float32, whatever `x` is.
        whole_outputs: outputs of the layer of which `weight` is a part, whose order of summation it keeps; 0 = N.

    Returns:
        [R, N], dtype of `x` or float32. Row r depends on row r of `x`, `weight` and `bias` only, to the last bit.

    Raises:
        ValueError: a shape, stride, dtype or device other than above.
    """
    checks.check_rows(x)
    weight_shape = (weight.shape[0] if weight.dim() == 2 else -1, x.shape[1])
    checks.check_tensor("weight", weight, weight_shape, x.dtype, x.device)
    if bias is not None:
        checks.check_column("bias", bias, weight.shape[0], x.dtype, x.device)
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(x, weight, bias, keeps_sums, whole_outputs)
