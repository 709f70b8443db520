"""Which tokens a block of drafts turns into: the three ways of comparing them with the target, mixed in one batch.

Turns sequences into the arguments of the kernels and implements no algorithm. A sequence's result depends on its
own rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import numpy as np
import torch

from betoken.engine.sampler import (
    SampleGroup,
    TokenLogprob,
    adjust_rows,
    logprobs_of_rows,
    noise_columns,
    sample_rows,
    sampling_columns,
)
from betoken.engine.sparse_probs import SparseProbs
from betoken.engine.staging import to_device
from betoken.kernels.accept import accept_block, longest_path
from betoken.kernels.rejection import DraftProbs, rejection
from betoken.kernels.typical import typical


class VerificationMode(Enum):
    """How draft tokens are compared with the target."""

    COUPLED = auto()
    """A draft token stays if it is the target's own; the draft changes no token."""
    REJECTION = auto()
    """Speculative sampling; the target's distribution, but the tokens depend on the draft."""
    TYPICAL = auto()
    """Typical acceptance; lossy."""


class TypicalBounds(NamedTuple):
    """A draft token x stays where target(x) > min(threshold, alpha * exp(-entropy(target)))."""

    threshold: float
    """0 to 1; the paper's epsilon."""
    alpha: float
    """0 or above; the paper's delta."""


PAPERS_BOUNDS = TypicalBounds(0.09, 0.3)
"""The values of Cai et al., "Medusa", arXiv:2401.10774."""


@dataclass(slots=True)
class BlockGroup:
    """The rows of one sequence, and how its draft is judged."""

    rows: SampleGroup
    mode: VerificationMode = VerificationMode.COUPLED
    draft_probs: Sequence[SparseProbs] = ()
    """REJECTION: what each draft id was sampled from; empty = each was certain."""
    bounds: TypicalBounds = PAPERS_BOUNDS
    """TYPICAL: how likely a draft token has to be."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a block."""

    path: list[int]
    """Accepted drafts by index, root first; the leading ones of a chain."""
    emitted_ids: list[int]
    """The accepted draft ids and one token of the target's. Empty: there is none after the committed ids, for the
    logits hold NaN or their largest is infinite."""
    logprobs: list[TokenLogprob]
    """One per emitted token when asked for, else empty."""

    @property
    def num_accepted(self) -> int:
        """Length of the path."""
        return len(self.path)


def verify_blocks(logits: torch.Tensor, groups: Sequence[BlockGroup]) -> list[Verified]:
    """Judges every group's draft. Acceptance ends before a row whose logits choose no token.

    Args:
        logits: [R, V] bfloat16, float16 or float32, contiguous.
        groups: sequences in row order; their rows add up to R.
    Raises:
        ValueError: the rows do not add up, or the logits are not as above.
    """
    rows = [group.rows for group in groups]
    adjusted = adjust_rows(logits, rows)
    target_ids = sample_rows(adjusted, rows)
    chosen_ids = target_ids.tolist()
    all_judged = [_Judged(group, first_row) for group, first_row in zip(groups, _first_rows(rows), strict=True)]
    for mode in {group.mode for group in groups}:
        members = [judged for judged in all_judged if judged.group.mode is mode]
        if mode is VerificationMode.COUPLED:
            _judge_equality(chosen_ids, members)
        elif mode is VerificationMode.TYPICAL:
            _judge_typically(adjusted, chosen_ids, members)
        else:
            _judge_by_rejection(adjusted, target_ids.clamp_min(0), members)
    emitted = [judged.emitted(chosen_ids) for judged in all_judged]
    for row, token_id in chain.from_iterable(emitted):
        chosen_ids[row] = token_id  # logprobs are of emitted ids
    logprobs = logprobs_of_rows(logits, chosen_ids, rows)
    return [
        Verified(
            judged.path[: max(0, len(tokens) - 1)],
            [token_id for _, token_id in tokens],
            [logprob for row, _ in tokens if (logprob := logprobs[row]) is not None],
        )
        for judged, tokens in zip(all_judged, emitted, strict=True)
    ]


@dataclass(slots=True)
class _Judged:
    """A group, and what became of its draft."""

    group: BlockGroup
    first_row: int
    path: list[int] = field(default_factory=list)
    """Accepted drafts by index, root first."""
    next_id: int = -1
    """Token after the path."""

    def emitted(self, chosen_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(row that chose it, id) of each emitted token. They end before a row whose logits chose none."""
        draft_ids = self.group.rows.draft_ids
        rows = [self.first_row, *(self.first_row + 1 + node for node in self.path)]
        ids = [*(draft_ids[node] for node in self.path), self.next_id]
        return list(takewhile(lambda token: chosen_ids[token[0]] >= 0, zip(rows, ids, strict=True)))


def _judge_equality(chosen_ids: Sequence[int], members: Sequence[_Judged]) -> None:
    """Judge COUPLED groups."""
    for judged in members:
        rows, first = judged.group.rows, judged.first_row
        path, next_id = accept_block(chosen_ids[first : first + rows.num_rows], rows.draft_ids, rows.parents)
        judged.path, judged.next_id = path, next_id


def _judge_typically(adjusted: torch.Tensor, chosen_ids: Sequence[int], members: Sequence[_Judged]) -> None:
    """Judge TYPICAL groups, chains and trees: the longest path all of whose tokens are likely enough."""
    device = adjusted.device
    groups = [judged.group.rows for judged in members]
    own = _own_rows(members, device)
    before: list[int] = []  # a draft token is judged by its predecessor's row: a group's first, or a token's
    for group, first_row in zip(groups, _first_rows(groups), strict=True):
        parents = range(-1, len(group.draft_ids) - 1) if group.parents is None else group.parents
        before += [first_row + 1 + parent for parent in parents]
    draft_ids = [draft_id for group in groups for draft_id in group.draft_ids]
    bounds = zip(*(judged.group.bounds for judged in members for _ in range(judged.group.rows.num_rows)), strict=True)
    nodes = [np.array(numbers, np.int64) for numbers in (before, draft_ids)]
    columns = to_device([*nodes, *(np.array(values, np.float32) for values in bounds)], device)
    judged_nodes = typical(adjusted[own], *columns, *sampling_columns(groups, device))
    is_accepted, shares = (column.tolist() for column in judged_nodes)
    start = 0
    for judged in members:
        end = start + len(judged.group.rows.draft_ids)
        judged.path = longest_path(is_accepted[start:end], shares[start:end], judged.group.rows.parents)
        last = judged.first_row + 1 + judged.path[-1] if judged.path else judged.first_row
        judged.next_id = max(0, chosen_ids[last])
        start = end


def _judge_by_rejection(adjusted: torch.Tensor, target_ids: torch.Tensor, members: Sequence[_Judged]) -> None:
    """Judge REJECTION groups, chains all."""
    device = adjusted.device
    groups = [judged.group.rows for judged in members]
    rows = _own_rows(members, device)
    draft_ids = torch.tensor([draft_id for group in groups for draft_id in group.draft_ids], dtype=torch.int64)
    offsets = torch.tensor([0, *accumulate(len(group.draft_ids) for group in groups)])
    chains = (adjusted[rows], target_ids[rows], draft_ids.to(device), offsets.to(device))
    columns = sampling_columns(groups, device)
    probs = DraftProbs.from_lists([pair for judged in members for pair in _distributions(judged.group)], device)
    results = rejection(*chains, probs, *noise_columns(groups, device), *columns)
    num_accepted, next_ids = (result.tolist() for result in results)
    for judged, count, next_id in zip(members, num_accepted, next_ids, strict=True):
        judged.path, judged.next_id = list(range(count)), next_id


def _own_rows(members: Sequence[_Judged], device: torch.device) -> torch.Tensor:
    """[R'] int64 rows of these groups among all."""
    rows = [judged.first_row + row for judged in members for row in range(judged.group.rows.num_rows)]
    return torch.tensor(rows, device=device)


def _distributions(group: BlockGroup) -> list[tuple[list[int], list[float]]]:
    """Ids and probabilities per draft token of a group."""
    if not group.draft_probs:
        return [([], [])] * len(group.rows.draft_ids)
    return [(sparse.token_ids, sparse.probs) for sparse in group.draft_probs]


def _first_rows(groups: Sequence[SampleGroup]) -> list[int]:
    """First row of each group."""
    first_rows, row = [], 0
    for group in groups:
        first_rows.append(row)
        row += group.num_rows
    return first_rows
