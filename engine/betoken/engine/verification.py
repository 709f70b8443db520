"""Which tokens a block of drafts turns into: the three ways of comparing them with the target, mixed in one batch.

Turns sequences into the arguments of the kernels and knows no algorithm of its own. A sequence's verdict depends on its
own rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, takewhile

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
from betoken.kernels.accept import accept_block
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


@dataclass(slots=True)
class BlockGroup:
    """The rows of one sequence, and how its draft is judged."""

    rows: SampleGroup
    mode: VerificationMode = VerificationMode.COUPLED
    draft_probs: Sequence[SparseProbs] = ()
    """REJECTION: what each draft id was sampled from; empty = each was certain."""


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
    first_rows = _first_rows(rows)
    paths: list[list[int]] = [[] for _ in groups]
    emitted_rows: list[list[int]] = [[] for _ in groups]
    for mode in {group.mode for group in groups}:
        members = [index for index, group in enumerate(groups) if group.mode is mode]
        places = [(groups[index], first_rows[index]) for index in members]
        if mode is VerificationMode.COUPLED:
            judged = _judge_equality(chosen_ids, places)
        else:
            judged = _judge_probabilities(mode, adjusted, target_ids.clamp_min(0), places)
        for index, (path, next_id) in zip(members, judged, strict=True):
            emitted_ids = [*(rows[index].draft_ids[node] for node in path), next_id]
            path_rows = _rows_of(path, first_rows[index])
            emitted_rows[index] = list(takewhile(lambda row: chosen_ids[row] >= 0, path_rows))
            paths[index] = path[: max(0, len(emitted_rows[index]) - 1)]
            for row, token_id in zip(emitted_rows[index], emitted_ids, strict=False):
                chosen_ids[row] = token_id
    logprobs = logprobs_of_rows(logits, chosen_ids, rows)
    return [
        Verified(
            path,
            [chosen_ids[row] for row in path_rows],
            [logprob for row in path_rows if (logprob := logprobs[row]) is not None],
        )
        for path, path_rows in zip(paths, emitted_rows, strict=True)
    ]


def _rows_of(path: Sequence[int], first_row: int) -> list[int]:
    """The rows that chose what a block with this accepted path emits."""
    return [first_row, *(first_row + 1 + node for node in path)]


def _judge_equality(chosen_ids: Sequence[int], places: Sequence[tuple[BlockGroup, int]]) -> list[tuple[list[int], int]]:
    """(path, next_id) of COUPLED groups, each with its first row."""
    return [
        accept_block(chosen_ids[first : first + group.rows.num_rows], group.rows.draft_ids, group.rows.parents)
        for group, first in places
    ]


def _judge_probabilities(
    mode: VerificationMode,
    adjusted: torch.Tensor,
    target_ids: torch.Tensor,
    places: Sequence[tuple[BlockGroup, int]],
) -> list[tuple[list[int], int]]:
    """(path, next_id) of groups of one mode other than COUPLED, chains all, each with its first row."""
    device = adjusted.device
    groups = [group.rows for group, _ in places]
    rows = torch.tensor([first + i for group, first in places for i in range(group.rows.num_rows)], device=device)
    draft_ids = torch.tensor([draft_id for group in groups for draft_id in group.draft_ids], dtype=torch.int64)
    offsets = torch.tensor([0, *accumulate(len(group.draft_ids) for group in groups)])
    chains = (adjusted[rows], target_ids[rows], draft_ids.to(device), offsets.to(device))
    columns = sampling_columns(groups, device)
    if mode is VerificationMode.TYPICAL:
        results = typical(*chains, *columns)
    else:
        probs = DraftProbs.from_lists([pair for group, _ in places for pair in _distributions(group)], device)
        results = rejection(*chains, probs, *noise_columns(groups, device), *columns)
    num_accepted, next_ids = (result.tolist() for result in results)
    return [(list(range(count)), next_id) for count, next_id in zip(num_accepted, next_ids, strict=True)]


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
