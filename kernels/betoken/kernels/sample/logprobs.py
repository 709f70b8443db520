"""Log-probabilities of raw logits, for reporting; any device.

Temperature, filters and noise do not enter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import dispatch


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax of the raw float32 logits at the chosen ids, and the most likely ids.

    Args:
        logits: [R, V] bfloat16, float16 or float32.
        token_ids: [R] int64.
        num_top: n, 0 to V.
    Returns:
        logprob [R] float32; top_ids [R, n] int64, most likely first, lower ids first among equals; top_logprobs
        [R, n] float32.
    Raises:
        ValueError: shapes do not match, or n is out of range.
    """
    if logits.dim() != 2 or token_ids.shape != logits.shape[:1] or token_ids.dtype != torch.int64:
        raise ValueError(
            f"logits must be [R, V] and token_ids [R] int64, got {list(logits.shape)}, {list(token_ids.shape)}"
        )
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"num_top must be 0 to {logits.shape[1]}, got {num_top}")
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, token_ids, num_top)


def _reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    if num_top == 0:
        empty = logprobs.new_empty((logits.shape[0], 0))
        return chosen, empty.to(torch.int64), empty
    top_logprobs, top_ids = logprobs.topk(num_top, dim=1)
    # topk leaves open which of equal ids it takes and in what order: take all that tie with the n-th, order by id.
    num_candidates = int((logprobs >= top_logprobs[:, -1:]).sum(dim=1).max())
    if num_candidates > num_top:
        top_logprobs, top_ids = logprobs.topk(num_candidates, dim=1)
    by_id = top_ids.argsort(dim=1)
    top_ids, top_logprobs = top_ids.gather(1, by_id), top_logprobs.gather(1, by_id)
    by_logprob = top_logprobs.argsort(dim=1, descending=True, stable=True)[:, :num_top]
    return chosen, top_ids.gather(1, by_logprob), top_logprobs.gather(1, by_logprob)


IMPLEMENTATIONS: dict[
    dispatch.PathName,
    Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
] = {
    "reference": _reference,
    "triton": dispatch.triton("betoken.kernels.sample.logprobs_kernel", "token_logprobs"),
}
