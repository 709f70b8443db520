"""Typical acceptance: keeps draft tokens that the target finds likely enough. Lossy: it does not keep a distribution.

It knows no draft probabilities, and its own noise is that of the target ids it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import checks, dispatch
from betoken.kernels.typical import reference
from betoken.kernels.typical.reference import DELTA, EPSILON

__all__ = ["DELTA", "EPSILON", "typical"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "reference": reference.typical,
    "triton": dispatch.triton("betoken.kernels.typical.kernel", "typical"),
}


def typical(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    offsets: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts each draft token x while target(x) > min(EPSILON, DELTA * exp(-entropy(target))).

    target is softmax(logits / T) after top_k, top_p and min_p. The token after the accepted prefix is the target id of
    its row. Chains only. At T = 0 a token is accepted if it is the most likely one.

    Block b owns the draft tokens [offsets[b], offsets[b + 1]) and the rows [offsets[b] + b, offsets[b + 1] + b + 1).

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous, R = N + B. A block with a row of NaN, or
            without a finite largest value, comes to nothing useful; no other block does.
        target_ids: [R] int64, the target's own tokens.
        draft_ids: [N] int64.
        offsets: [B + 1] int64, from 0 to N, not decreasing.
        temperature, top_p, min_p: [R] float32; top_k: [R] int32; as in `betoken.kernels.sample.sample`.
    Returns:
        num_accepted [B] int64; next_id [B] int64.
    Raises:
        ValueError: a shape, stride, dtype or device other than above; on CPU also ids or offsets out of range.
    Source:
        Cai et al., "Medusa", arXiv:2401.10774, section 2.3.1.
    """
    checks.check_logits(logits)
    checks.check_chains(logits, target_ids, draft_ids, offsets)
    columns = (temperature, top_k, top_p, min_p)
    checks.check_columns(logits, checks.SAMPLING_COLUMNS, columns)
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, target_ids, draft_ids, offsets, *columns)
