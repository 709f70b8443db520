"""Speculative sampling by rejection: keeps draft tokens so that the emitted ones follow the target's distribution.

It knows the distributions the drafts were sampled from, as sent; how they came about is the drafter's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import checks, dispatch
from betoken.kernels.rejection import reference
from betoken.kernels.rejection.draft_probs import MAX_DRAFT_PROBS, DraftProbs

__all__ = ["MAX_DRAFT_PROBS", "DraftProbs", "rejection"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "reference": reference.rejection,
    "triton": dispatch.triton("betoken.kernels.rejection.kernel", "rejection"),
}


def rejection(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    offsets: torch.Tensor,
    draft_probs: DraftProbs,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts each draft token x with probability min(1, target(x) / draft(x)), up to the first refusal.

    target is softmax(logits / T) after top_k, top_p and min_p, draft the distribution x was sampled from. After a
    refusal the next token is sampled from norm(max(target - draft, 0)). After a wholly accepted block it is the row's
    own target id. Chains only. The emitted tokens follow the target's distribution exactly if every draft token was
    sampled from its distribution with noise independent of streams 1 and 2.

    Block b owns the draft tokens [offsets[b], offsets[b + 1]) and the rows [offsets[b] + b, offsets[b + 1] + b + 1).
    Its first row follows the last committed token, the next row its first draft token, and so on. The token chosen at a
    row is accepted by the uniform number of (seed, position, id 0, stream 1) and recovered by the Gumbel noise of
    (seed, position, id, stream 2). At T = 0 a token is accepted if it is the most likely one, and that one is
    recovered.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous, R = N + B. A block with a row of NaN, or
            without a finite largest value, comes to nothing useful; no other block does.
        target_ids: [R] int64, tokens sampled from the target with independent noise (`betoken.kernels.sample`).
        draft_ids: [N] int64.
        offsets: [B + 1] int64, from 0 to N, not decreasing.
        draft_probs: of the N draft tokens.
        seeds: [R] int64 bit pattern of the uint64 seed.
        positions: [R] int64 index in prompt + output of the token being chosen.
        temperature, top_p, min_p: [R] float32; top_k: [R] int32; as in `betoken.kernels.sample.sample`.
    Returns:
        num_accepted [B] int64; next_id [B] int64, recovered or bonus.
    Raises:
        ValueError: a shape, stride, dtype or device other than above; on CPU also ids or offsets out of range.
    Source:
        Leviathan, Kalman, Matias, arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318, algorithm 2.
    """
    checks.check_logits(logits)
    checks.check_chains(logits, target_ids, draft_ids, offsets)
    draft_probs.check(draft_ids.shape[0], logits.shape[1], logits.device)
    columns = (seeds, positions, temperature, top_k, top_p, min_p)
    checks.check_columns(logits, checks.NOISE_COLUMNS + checks.SAMPLING_COLUMNS, columns)
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, target_ids, draft_ids, offsets, draft_probs, *columns)
