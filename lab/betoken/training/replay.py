"""Replays known answers against a served drafter, round by round, to measure the acceptance of its drafts.

All answers are drafted for side by side, as in a worker, so that a pass serves many. It knows drafters by their
protocol, ids and hidden states; no training and no links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.sampling import SamplingParams
from betoken.training.block_efficiency import Rounds
from betoken.training.samples import Sample

_ROWS_AT_ONCE = 128


def accepted_depth(drafted: Drafted, following: Sequence[int]) -> int:
    """Number of leading draft tokens, chain or tree, that equal the continuation."""
    parents = range(-1, len(drafted.draft_ids) - 1) if drafted.parents is None else drafted.parents
    places = {
        (parent, token): index for index, (parent, token) in enumerate(zip(parents, drafted.draft_ids, strict=True))
    }
    node, depth = -1, 0
    while depth < len(following) and (child := places.get((node, following[depth]))) is not None:
        node, depth = child, depth + 1
    return depth


def states_of(runner: ModelRunner, ids: Sequence[int]) -> torch.Tensor:
    """[T, S, H] hidden states of the layers that the runner gives."""
    page_ids, _ = runner.page_table.allocate(list(ids))
    pieces = [ids[start : start + _ROWS_AT_ONCE] for start in range(0, len(ids), _ROWS_AT_ONCE)]
    states = []
    for index, piece in enumerate(pieces):
        features = runner.forward([Segment(page_ids, index * _ROWS_AT_ONCE, list(piece), 1)]).features
        assert features is not None
        states.append(features.clone())
    runner.page_table.release(page_ids)
    return torch.cat(states)


def replay(
    drafter: Any, samples: Sequence[Sample], num_tokens: int, states: Sequence[torch.Tensor] | None = None
) -> Rounds:
    """Draft at most `num_tokens` a round, trees if the drafter makes them, until all answers are committed.

    Args:
        drafter: a `Drafter`; with states a `FeatureReader`, too.
        states: [T, S, H] of each sample.
    """
    rounds = Rounds()
    active: dict[DraftSequence, int] = {}
    for index, sample in enumerate(samples):
        first = max(1, sample.prompt_length)
        known = list(sample.ids[:first]), list(sample.ids[first : first + 1])
        seq = DraftSequence(
            (0, index), SamplingParams(temperature=0.0), *known, len(sample.ids) + num_tokens, takes_trees=True
        )
        drafter.open(seq)
        _commit(drafter, seq, 0, index, states)
        active[seq] = index
    while active:
        drafted = _draft(drafter, active, num_tokens)
        for seq, index in list(active.items()):
            following = samples[index].ids[len(seq.ids) :]
            if not following:
                drafter.close(seq)
                del active[seq]
                continue
            told = len(seq.ids) - 1
            accepted = accepted_depth(drafted[seq], following) if seq in drafted else 0
            new = list(following[: rounds.add_round(accepted, len(following))])
            seq.ids.extend(new)
            seq.output_ids.extend(new)
            drafter.commit(seq, new)
            _commit(drafter, seq, told, index, states)
    return rounds


def _draft(drafter: Any, active: dict[DraftSequence, int], num_tokens: int) -> dict[DraftSequence, Drafted]:
    for seq in active:
        drafter.request(seq, num_tokens)
    drafted: dict[DraftSequence, Drafted] = {}
    while drafter.has_work:
        drafted |= {answer.sequence: answer for answer in drafter.step()}
    return drafted


def _commit(drafter: Any, seq: DraftSequence, first: int, index: int, states: Sequence[torch.Tensor] | None) -> None:
    """The states of positions from `first` to the last but one."""
    if states is not None:
        own = states[index][first : len(seq.ids) - 1]
        drafter.observe([FeatureSpan(seq, first, 0, len(own))], own)
