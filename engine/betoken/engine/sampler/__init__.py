"""From logits to the target's own tokens, for the rows of many sequences in one call.

It turns each sequence's parameters and history into the arguments of the kernels and implements no algorithm:
rules are in `rules`, sampling in `betoken.kernels`. A row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from betoken.common.tree import node_depths
from betoken.engine.rules.logits_rules import BlockPath
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampling import SamplingParams
from betoken.engine.staging import to_device
from betoken.kernels.logits_adjust import logits_adjust
from betoken.kernels.sample import greedy, sample, token_logprobs
from betoken.kernels.sample.perturbed import perturbed_top as top_of_rows

_ROWS_AT_ONCE = 64
"""Rows of a prompt whose logprobs are in memory at a time."""


@dataclass(slots=True)
class SampleGroup:
    """The rows of one sequence, consecutive in the logits.

    Row 0 follows output_ids, row i + 1 draft_ids[i] and what that one follows: draft_ids[parents[i]] and so on, in a
    chain draft_ids[:i]. A row that follows n draft ids chooses the token at position
    len(prompt_ids) + len(output_ids) + n.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Committed output; of a drafter, with what it has drafted so far."""
    draft_ids: Sequence[int]
    rules: SequenceRules | None = None
    """The sequence's, which have followed the committed output; None = made of the parameters for this call."""
    parents: Sequence[int] | None = None
    """Tree: index of each draft id's parent, -1 = the last committed token; None = a chain."""
    num_ahead: int = 0
    """Tokens between the output and row 0 whose ids are not known; rules go by the output alone."""

    def adjustments(self) -> BlockPath | None:
        """The adjustments of the rows by the rules; None without adjustments."""
        rules = self.rules
        if rules is None:
            if not self.params.has_rules:
                return None
            rules = SequenceRules(self.params, self.prompt_ids, self.output_ids)
        return rules.rows(self.draft_ids, self.parents, self.output_ids[rules.num_committed :])

    @property
    def num_rows(self) -> int:
        return len(self.draft_ids) + 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-softmax of the raw float32 logits: of the chosen id, and of the most likely ids, most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Chosen:
    """One entry per row of the logits; logprobs are None if the sequence did not request them."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


def choose_tokens(logits: torch.Tensor, groups: Sequence[SampleGroup]) -> Chosen:
    """Chooses every row's own token; for drafters: a row that has none (see `sample_rows`) gets id 0.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous.
        groups: sequences in row order; their rows add up to R. Ids beyond V in a history or a bias adjust nothing.
    Raises:
        ValueError: the rows do not add up, or the logits are not as above.
    """
    adjusted = adjust_rows(logits, groups)
    token_ids = [max(0, token_id) for token_id in sample_rows(adjusted, groups).tolist()]
    return Chosen(token_ids, logprobs_of_rows(logits, token_ids, groups))


def adjust_rows(logits: torch.Tensor, groups: Sequence[SampleGroup]) -> torch.Tensor:
    """[R, V] the logits after every group's rules, float32; the logits themselves if no rule applies.

    Raises:
        ValueError: the rows do not add up.
    """
    num_rows = sum(group.num_rows for group in groups)
    if logits.dim() != 2 or logits.shape[0] != num_rows:
        raise ValueError(f"the groups have {num_rows} rows, the logits are {list(logits.shape)}")
    return _adjust(logits, groups)


def sample_rows(adjusted: torch.Tensor, groups: Sequence[SampleGroup]) -> torch.Tensor:
    """[R] int64 the coupled token of every row of adjusted logits; -1 where NaN or an infinite largest leaves none."""
    if all(group.params.temperature == 0.0 for group in groups):
        return greedy(adjusted)
    return sample(adjusted, *noise_columns(groups, adjusted.device), *sampling_columns(groups, adjusted.device))


def perturbed_top(
    logits: torch.Tensor, groups: Sequence[SampleGroup], num_top: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `num_top` candidates for every row's token, best first.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous.
        groups: sequences in row order; their rows add up to R.
        num_top: m, at least 1.
        scale: above 0; see `betoken.kernels.sample.perturbed`.
    Returns:
        ids [R, min(m, V)] int64, the first being what `choose_tokens` chooses; log_shares [R, min(m, V)] float32, how
        likely each is another model's choice with the same noise.
    Raises:
        ValueError: the rows do not add up, or an argument is not as above.
    """
    columns = (*noise_columns(groups, logits.device), *sampling_columns(groups, logits.device))
    return top_of_rows(adjust_rows(logits, groups), num_top, scale, *columns)


def logprobs_of_rows(
    logits: torch.Tensor, token_ids: Sequence[int], groups: Sequence[SampleGroup]
) -> list[TokenLogprob | None]:
    """One entry per row: of the row's token id ([R]; -1 counts as 0) under the raw logits, where its sequence asked."""
    logprobs: list[TokenLogprob | None] = [None] * logits.shape[0]
    if any(group.params.num_logprobs is not None for group in groups):
        _fill_logprobs(logprobs, logits, token_ids, groups)
    return logprobs


def logprobs_of_tokens(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Logprobs of known tokens, one per row of raw logits [R, V], few rows at a time: they may be a long prompt's."""
    told: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        ids = torch.tensor(token_ids[start:end], device=logits.device)
        columns = token_logprobs(logits[start:end], ids, min(num_top, logits.shape[1]))
        told += [TokenLogprob(*column) for column in zip(*(c.tolist() for c in columns), strict=True)]
    return told


def noise_columns(groups: Sequence[SampleGroup], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Seed and position of every row, as the kernels take them."""
    positions: list[int] = []
    seeds: list[int] = []
    for group in groups:
        first = len(group.prompt_ids) + len(group.output_ids) + group.num_ahead
        if group.parents is None:
            positions += range(first, first + group.num_rows)
        else:
            positions += [first, *(first + 1 + depth for depth in node_depths(group.parents))]
        seeds += [group.params.seed] * group.num_rows
    columns = (np.array(seeds, dtype=np.uint64).view(np.int64), np.array(positions, dtype=np.int64))
    return tuple(to_device(columns, device))


def sampling_columns(groups: Sequence[SampleGroup], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Temperature, top_k, top_p and min_p of every row, as the kernels take them."""
    rows = [params for group in groups for params in [group.params] * group.num_rows]
    columns = (
        np.array([params.temperature for params in rows], dtype=np.float32),
        np.array([params.top_k for params in rows], dtype=np.int32),
        np.array([params.top_p for params in rows], dtype=np.float32),
        np.array([params.min_p for params in rows], dtype=np.float32),
    )
    return tuple(to_device(columns, device))


def _adjust(logits: torch.Tensor, groups: Sequence[SampleGroup]) -> torch.Tensor:
    """[R, V] float32 with every group's rules applied; the logits themselves if none applies."""
    num_rows, vocab_size = logits.shape
    num_entries = np.zeros(num_rows + 1, dtype=np.int64)
    pieces: list[tuple[NDArray[Any], ...]] = []
    allowed: NDArray[np.int32] | None = None
    first = 0
    for group in groups:
        end = first + group.num_rows
        path = group.adjustments()
        if path is not None:
            num_known = int(np.searchsorted(path.token_ids, vocab_size))  # a draft model may know fewer ids
            pieces.append((np.tile(path.token_ids[:num_known], end - first), *path.columns(num_known)))
            num_entries[first + 1 : end + 1] = num_known
            if path.allowed is not None:
                if allowed is None:
                    allowed = np.full((num_rows, -(-vocab_size // 32)), -1, dtype=np.int32)
                # A model's rows may be padded, or a draft model know fewer ids: what the mask lacks is refused.
                num_words = min(allowed.shape[1], path.allowed.shape[1])
                allowed[first:end, num_words:] = 0
                allowed[first:end, :num_words] = path.allowed[:, :num_words]
        first = end
    if not pieces:
        return logits
    entries = [np.cumsum(num_entries), *(np.concatenate(parts) for parts in zip(*pieces, strict=True))]
    row_offsets, ids, bias, scale, penalty, *masks = to_device(
        entries if allowed is None else [*entries, allowed], logits.device
    )
    adjusted = logits.to(torch.float32, copy=True)
    logits_adjust(adjusted, row_offsets, ids, bias, scale, penalty, masks[0] if masks else None)
    return adjusted


def _fill_logprobs(
    logprobs: list[TokenLogprob | None], logits: torch.Tensor, token_ids: Sequence[int], groups: Sequence[SampleGroup]
) -> None:
    """Writes the entries of the groups that asked; logits are raw [R, V], token_ids [R]."""
    wanted: list[tuple[int, int]] = []
    first = 0
    for group in groups:
        end, num_top = first + group.num_rows, group.params.num_logprobs
        if num_top is not None:
            wanted += [(row, num_top) for row in range(first, end)]
        first = end
    rows = torch.tensor([row for row, _ in wanted], device=logits.device)
    most = min(max(num_top for _, num_top in wanted), logits.shape[1])
    ids = torch.tensor([max(0, token_ids[row]) for row, _ in wanted], device=logits.device)
    columns = token_logprobs(logits[rows], ids, most)
    for (row, num_top), logprob, top_ids, top_logprobs in zip(wanted, *(c.tolist() for c in columns), strict=True):
        logprobs[row] = TokenLogprob(logprob, top_ids[:num_top], top_logprobs[:num_top])
