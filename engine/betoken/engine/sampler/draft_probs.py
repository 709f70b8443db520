"""Draft tokens that come with what they were sampled from, for verification by rejection.

It knows rows of a draft model's logits; who sends the distributions where is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from betoken.engine.sampler import SampleGroup, adjust_rows, noise_columns, sampling_columns
from betoken.engine.sparse_probs import SparseProbs
from betoken.kernels.rejection import MAX_DRAFT_PROBS
from betoken.kernels.sample.truncated import sample_truncated


def sample_drafts(logits: torch.Tensor, groups: Sequence[SampleGroup]) -> list[tuple[int, SparseProbs]]:
    """Samples each group's next draft token, with noise of the drafter's own, from its most likely ids.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous.
        groups: one per row, without draft ids.
    Returns:
        Per row the token and the distribution it was sampled from.
    Raises:
        ValueError: the rows do not add up, or the logits are not as above.
    """
    adjusted = adjust_rows(logits, groups)
    columns = (*noise_columns(groups, logits.device), *sampling_columns(groups, logits.device))
    token_ids, ids, probs = sample_truncated(adjusted, MAX_DRAFT_PROBS, *columns)
    num_kept = (probs > 0.0).sum(dim=1).tolist()  # the most likely come first, so these are the leading ones
    return [
        (token_id, SparseProbs(row_ids[:count], row_probs[:count]))
        for token_id, row_ids, row_probs, count in zip(
            token_ids.tolist(), ids.tolist(), probs.tolist(), num_kept, strict=True
        )
    ]
