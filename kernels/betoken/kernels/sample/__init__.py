"""The coupled token of each row of logits, and the log-probabilities reported with it.

`token = argmax_v logits(v) + T * gumbel(seed, position, v)` over the ids that top_k, top_p and min_p leave. It knows
rows only: no sequences, no drafts, no rules (see `logits_adjust`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import dispatch, native
from betoken.kernels.checks import NOISE_COLUMNS, SAMPLING_COLUMNS, check_columns, check_logits
from betoken.kernels.sample import reference
from betoken.kernels.sample.logprobs import token_logprobs

__all__ = ["greedy", "sample", "token_logprobs"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., torch.Tensor]] = {
    "reference": reference.sample,
    "native": native.sample,
    "triton": dispatch.triton("betoken.kernels.sample.kernel", "sample"),
}

GREEDY_IMPLEMENTATIONS: dict[dispatch.PathName, Callable[[torch.Tensor], torch.Tensor]] = {
    "reference": reference.greedy,
    "native": native.greedy,
    "triton": dispatch.triton("betoken.kernels.sample.kernel", "greedy"),
}


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely id of each row, the lowest among equals; what `sample` gives at T = 0.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous.
    Returns:
        [R] int64; -1 as in `sample`.
    Raises:
        ValueError: a shape, stride or dtype other than above.
    """
    check_logits(logits)
    _, implementation = dispatch.select(logits.device, GREEDY_IMPLEMENTATIONS)
    return implementation(logits)


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The coupled token of every row; a row's result depends on that row's arguments alone.

    Filters apply in the order of their names, each on softmax(logits / T) of the ids that the one before left. top_k
    keeps the k most likely ids. top_p keeps an id while the ids above it hold less than top_p. min_p keeps ids at least
    min_p times as likely as the most likely one. Ids tied with a threshold stay. Every step is one IEEE float32
    operation or an integer one, so implementations agree bit for bit.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous.
        seeds: [R] int64 bit pattern of the uint64 seed.
        positions: [R] int64 index in prompt + output of the token being chosen.
        temperature: [R] float32; 0 = greedy.
        top_k: [R] int32; 0 = all ids.
        top_p: [R] float32 in (0, 1]; 1 = all ids.
        min_p: [R] float32 in [0, 1]; 0 = all ids.
    Returns:
        [R] int64 ids; the lowest id wins a tie. -1 for a row that chooses nothing at any temperature: it holds NaN,
        or its largest value is infinite.
    Raises:
        ValueError: a shape, stride, dtype or device other than above.
    Source:
        Gumbel-max sampling; shared noise for drafts: Daliri, Musco, Suresh, arXiv:2408.07978.
    """
    check_logits(logits)
    per_row = (seeds, positions, temperature, top_k, top_p, min_p)
    check_columns(logits, NOISE_COLUMNS + SAMPLING_COLUMNS, per_row)
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, *per_row)
