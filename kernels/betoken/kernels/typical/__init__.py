"""Typical acceptance: keeps draft tokens that the target finds likely enough. Lossy: it does not keep a distribution.

It judges each draft token by itself and knows neither draft probabilities, nor noise, nor which one follows which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import checks, dispatch
from betoken.kernels.typical import reference

__all__ = ["typical"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "reference": reference.typical,
    "triton": dispatch.triton("betoken.kernels.typical.kernel", "typical"),
}

_BOUNDS = (("epsilon", torch.float32), ("delta", torch.float32))


def typical(
    logits: torch.Tensor,
    rows: torch.Tensor,
    draft_ids: torch.Tensor,
    epsilon: torch.Tensor,
    delta: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether target(x) > min(epsilon, delta * exp(-entropy(target))) for each draft token x.

    target is softmax(logits / T) after top_k, top_p and min_p, of the row that the token would follow. At T = 0 a token
    is accepted if it is the most likely one.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous. What a row of NaN, or without a finite largest value,
            says of its drafts is of no use; no other row is concerned.
        rows: [N] int64, of each draft token the row that it would follow.
        draft_ids: [N] int64.
        epsilon, delta: [R] float32, 0 or above.
        temperature, top_p, min_p: [R] float32; top_k: [R] int32; as in `betoken.kernels.sample.sample`.
    Returns:
        is_accepted [N] bool; target(x) [N] float64.
    Raises:
        ValueError: a shape, stride, dtype or device other than above; on CPU also ids or rows out of range.
    Source:
        Cai et al., "Medusa", arXiv:2401.10774, section 2.3.1.
    """
    checks.check_logits(logits)
    for name, tensor, limit in (("rows", rows, logits.shape[0]), ("draft_ids", draft_ids, logits.shape[1])):
        checks.check_column(name, tensor, draft_ids.numel(), torch.int64, logits.device)
        checks.check_ids(name, tensor, limit)
    columns = (epsilon, delta, temperature, top_k, top_p, min_p)
    checks.check_columns(logits, _BOUNDS + checks.SAMPLING_COLUMNS, columns)
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, rows, draft_ids, *columns)
