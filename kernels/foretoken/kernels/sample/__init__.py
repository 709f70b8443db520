"""The coupled token of each row of logits, and the log-probabilities reported beside it.

`token = argmax_v logits(v) + T * gumbel(seed, position, v)` over the ids that top_k, top_p and min_p leave. It knows
rows only: no sequences, no drafts, no rules (see `logits_adjust`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretoken.kernels import dispatch, native
from foretoken.kernels.sample import reference
from foretoken.kernels.sample.logprobs import token_logprobs

__all__ = ["greedy", "sample", "token_logprobs"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., torch.Tensor]] = {
    "reference": reference.sample,
    "native": native.sample,
}

_LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_DTYPES = (
    ("seeds", torch.int64),
    ("positions", torch.int64),
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely id of each row, the lowest among equals; what `sample` gives at T = 0.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous, no NaN.
    Returns:
        [R] int64.
    Raises:
        ValueError: a shape, stride or dtype other than above.
    """
    _check_logits(logits)
    return reference.argmax_rows(logits.to(torch.float32))


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

    Filters apply in the order of their names, each on softmax(logits / T) of what the one before left: top_k keeps
    the k most likely ids; top_p keeps an id while the ids above it hold less than top_p; min_p keeps ids at least
    min_p times as likely as the most likely one. Ids tied with a threshold stay. Every step is one IEEE float32
    operation or an integer one, so implementations agree bit for bit.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous, no NaN, a finite largest value per row.
        seeds: [R] int64 bit pattern of the uint64 seed.
        positions: [R] int64 index in prompt + output of the token being chosen.
        temperature: [R] float32; 0 = greedy.
        top_k: [R] int32; 0 = all ids.
        top_p: [R] float32 in (0, 1]; 1 = all ids.
        min_p: [R] float32 in [0, 1]; 0 = all ids.
    Returns:
        [R] int64 ids; the lowest id wins a tie.
    Raises:
        ValueError: a shape, stride, dtype or device other than above.
    Source:
        Gumbel-max sampling; shared noise for drafts: Daliri, Musco, Suresh, arXiv:2408.07978.
    """
    _check_logits(logits)
    per_row = (seeds, positions, temperature, top_k, top_p, min_p)
    for (name, dtype), tensor in zip(_ROW_DTYPES, per_row, strict=True):
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [{logits.shape[0]}] {dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
        if tensor.device != logits.device:
            raise ValueError(f"{name} must be on {logits.device}, got {tensor.device}")
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, *per_row)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in _LOGITS_DTYPES or not logits.is_contiguous() or logits.shape[1] < 1:
        raise ValueError(
            f"logits must be contiguous [R, V] bfloat16, float16 or float32, got {list(logits.shape)} {logits.dtype}"
        )
