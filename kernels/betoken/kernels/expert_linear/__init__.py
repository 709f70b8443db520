"""Linear layers of many experts, each row by its selected expert: no row depends on other rows of its expert.

Stock grouped products pick their algorithm by the number of rows. This one adds up as `linear` does, in an order of
the weight's shape alone. It does not know routers: a token that visits k experts comes k times.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.kernels import checks, dispatch
from betoken.kernels.expert_linear import reference

__all__ = ["expert_linear"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.expert_linear,
    "triton": dispatch.triton("betoken.kernels.expert_linear.kernel", "expert_linear"),
}


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, whole_outputs: int = 0) -> Tensor:
    """y[s] = x[s] W[e]^T + b[e], e = expert_ids[s], with float32 products and sums, rounded once at the end.

    Args:
        x: [S, K] bfloat16, float16 or float32, contiguous, S and K at least 1.
        weight: [E, N, K], dtype of `x`, any strides: models that keep [E, K, N] give a transposed view.
        bias: [E, N], contiguous, dtype of `x`.
        expert_ids: [S] int64, 0 to E - 1. Read on the device only.
        whole_outputs: outputs of the layer of which `weight` is a part, whose order of summation it keeps; 0 = N.

    Returns:
        [S, N], dtype of `x`. Row s depends on row s of `x` and on its expert's weights and bias only, to the last bit.

    Raises:
        ValueError: a shape, stride, dtype or device other than above, or, on CPU, an id out of range.
    """
    checks.check_rows(x)
    if weight.dim() != 3 or weight.shape[2] != x.shape[1] or 0 in weight.shape or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be [E, N, {x.shape[1]}] {x.dtype}, at least one of each,"
            f" got {list(weight.shape)} {weight.dtype}"
        )
    if weight.device != x.device:
        raise ValueError(f"weight must be on {x.device}, got {weight.device}")
    if bias is not None:
        checks.check_tensor("bias", bias, tuple(weight.shape[:2]), x.dtype, x.device)
    checks.check_column("expert_ids", expert_ids, x.shape[0], torch.int64, x.device)
    checks.check_ids("expert_ids", expert_ids, weight.shape[0])
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(x, weight, bias, expert_ids, whole_outputs)
