"""Linear layers of many experts whose weights are of few bits, each row by the expert that it names.

A slot's result depends on no other slot. It does not know routers: a token that visits k experts comes k times.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.kernels import checks, dispatch
from betoken.kernels.expert_linear_grouped import reference
from betoken.kernels.linear_grouped import Grouped

__all__ = ["expert_linear_grouped"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., Tensor]] = {
    "reference": reference.expert_linear_grouped,
    "triton": dispatch.triton("betoken.kernels.expert_linear_grouped.kernel", "expert_linear_grouped"),
}


def expert_linear_grouped(
    x: Tensor, weight: Grouped, bias: Tensor | None, expert_ids: Tensor, num: int, whole_outputs: int = 0
) -> Tensor:
    """y[s] = x[s] W[e]^T + b[e], e = expert_ids[s], with float32 products and sums, rounded once at the end.

    The CPU kernel takes packed weights and is an operator of `betoken.kernels.cpu`.

    Args:
        x: [S, K] bfloat16, float16 or float32, contiguous, S and K at least 1.
        weight: [E * N, K], the experts' one below the other, inputs in their own order.
        bias: [E, N], contiguous, dtype of `x`.
        expert_ids: [S] int64, 0 to E - 1. Read on the device only.
        num: E, at least 1.
        whole_outputs: outputs of the layer of which `weight` is a part, whose order of summation it keeps; 0 = N.

    Returns:
        [S, N], dtype of `x`. Row s depends on row s of `x` and on its expert's weights and bias only, to the last bit.

    Raises:
        ValueError: a shape, stride, dtype or device other than above, or, on CPU, an id out of range.
    """
    checks.check_rows(x)
    height, num_inputs = weight.shape
    if num < 1 or height % num or not height or num_inputs != x.shape[1] or weight.order is not None:
        raise ValueError(
            f"weight must be [{num} * N, {x.shape[1]}], inputs in their own order, got {[height, num_inputs]}"
        )
    if weight.values.device != x.device:
        raise ValueError(f"weight must be on {x.device}, got {weight.values.device}")
    if bias is not None:
        checks.check_tensor("bias", bias, (num, height // num), x.dtype, x.device)
    checks.check_column("expert_ids", expert_ids, x.shape[0], torch.int64, x.device)
    checks.check_ids("expert_ids", expert_ids, num)
    _, implementation = dispatch.select(x.device, IMPLEMENTATIONS)
    return implementation(x, weight, bias, expert_ids, num, whole_outputs)
