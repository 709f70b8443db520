"""The first few ids in the order of what `sample` takes the largest of: what a drafter that branches proposes.

A drafter's first guess at a position is its own coupled token, its second the id that comes next with the same noise.
It knows rows only: no trees, no target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import checks, dispatch, native
from betoken.kernels.sample import reference

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "reference": reference.perturbed_top,
    "native": native.perturbed_top,
}


def perturbed_top(
    logits: torch.Tensor,
    num_top: int,
    scale: float,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids with the largest logits + temperature * noise of every row, among the ids that pass the filters.

    Args:
        num_top: m, at least 1.
        scale: above 0; distance of another model's scores from these, see below.
        logits, seeds, positions, temperature, top_k, top_p, min_p: as in `betoken.kernels.sample.sample`.
    Returns:
        ids [R, min(m, V)] int64, best first, the lowest of equals first: column 0 is what `sample` gives, or some id
        if that gives none.
        log_shares [R, min(m, V)] float32, at most 0: log-softmax of scores / scale over the ids that are left, the
        probability of being the largest once each score has an independent Gumbel error of that scale; equal between
        implementations up to rounding. Rows with fewer than m ids left are filled with id 0 and -inf.
    Raises:
        ValueError: a shape, stride, dtype or device other than above, m below 1, or a scale that is not above 0.
    """
    if num_top < 1:
        raise ValueError(f"num_top must be at least 1, got {num_top}")
    if not scale > 0.0:
        raise ValueError(f"scale must be above 0, got {scale}")
    checks.check_logits(logits)
    columns = (seeds, positions, temperature, top_k, top_p, min_p)
    checks.check_columns(logits, checks.NOISE_COLUMNS + checks.SAMPLING_COLUMNS, columns)
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, num_top, scale, *columns)
