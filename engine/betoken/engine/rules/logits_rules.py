"""Logits rules: pure functions of (prompt ids, path ids) that adjust the logits of a block's rows.

A rule sees all rows of one sequence at once. Row 0 follows the committed output; row i + 1 follows draft id i and its
path. It knows no logits and no model; the adjustments are applied by `betoken.kernels.logits_adjust`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from betoken.common.tree import node_depths
from betoken.engine.rules.prompt import distinct_ids, prompt_distinct_ids
from betoken.engine.sampling import SamplingParams

_NEUTRAL = {"bias": 0.0, "scale": 1.0, "penalty": 0.0}


@dataclass(slots=True)
class BlockPath:
    """The paths of a block's rows, and the adjustments collected for them.

    M ids may be adjusted, the same in every row; what no rule touches stays neutral.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Committed output, and what a drafter has drafted after it."""
    draft_ids: Sequence[int]
    parents: Sequence[int]
    """Index of the draft id that each draft id follows; -1 = the committed output."""
    num_drafts: NDArray[np.int64]
    """[rows] how many draft ids a row follows."""
    token_ids: NDArray[np.int64]
    """[M] vocabulary ids, ascending and unique."""
    in_prompt: NDArray[np.bool_]
    """[M] whether the id occurs in the prompt; False throughout when no rule reads the prompt."""
    counts: NDArray[np.int32]
    """[rows, M] occurrences in the output that a row follows; 0 throughout when no rule reads the output."""
    allowed: NDArray[np.int32] | None = None
    """[rows, ceil(V / 32)] bitmask of allowed ids, bit v & 31 of word v >> 5; None allows all."""

    _adjustments: dict[str, NDArray[np.float32]] = field(default_factory=dict, init=False)
    """Arrays that a rule has asked for, by name."""

    @property
    def bias(self) -> NDArray[np.float32]:
        """[rows, M] added first."""
        return self._adjustment("bias")

    @property
    def scale(self) -> NDArray[np.float32]:
        """[rows, M] then divides values that are not negative and multiplies others."""
        return self._adjustment("scale")

    @property
    def penalty(self) -> NDArray[np.float32]:
        """[rows, M] then subtracted; +inf masks."""
        return self._adjustment("penalty")

    def _adjustment(self, name: str) -> NDArray[np.float32]:
        if name not in self._adjustments:
            self._adjustments[name] = np.full(self.counts.shape, _NEUTRAL[name], dtype=np.float32)
        return self._adjustments[name]

    def columns(self, num_ids: int) -> list[NDArray[np.float32]]:
        """Bias, scale and penalty of the first `num_ids` ids, row after row: [rows * num_ids] each."""
        size = len(self.counts) * num_ids
        return [
            self._adjustments[name][:, :num_ids].ravel()
            if name in self._adjustments
            else np.broadcast_to(np.float32(neutral), size)
            for name, neutral in _NEUTRAL.items()
        ]

    def followed_by(self, row: int) -> list[int]:
        """The output and draft ids a row follows."""
        followed: list[int] = []
        node = row - 1
        while node >= 0:
            followed.append(self.draft_ids[node])
            node = self.parents[node]
        return [*self.output_ids, *reversed(followed)]

    def allow(self, row: int, mask: NDArray[np.int32]) -> None:
        """Narrows what a row allows to the bits of `mask`, [ceil(V / 32)]."""
        if self.allowed is None:
            self.allowed = np.full((len(self.draft_ids) + 1, len(mask)), -1, dtype=np.int32)
        self.allowed[row] &= mask

    def places(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Columns of ids that are among token_ids."""
        return np.searchsorted(self.token_ids, np.asarray(ids, dtype=np.int64))


class LogitsRule:
    """One rule: a pure function of a block's paths."""

    reads_prompt: bool = False
    """Whether the prompt's ids must be among token_ids."""
    reads_output: bool = False
    """Whether the ids of output and draft must be among token_ids, with counts."""
    own_ids: Sequence[int] = ()
    """Ids it adjusts whether or not they occur."""

    def applies_after(self, num_outputs: int) -> bool:
        """Whether a block that follows this many output ids has anything to adjust."""
        return True

    def commit(self, ids: Sequence[int]) -> None:
        """The sequence's output has grown by these; for rules that would else read all of it at every step."""

    def adjust(self, path: BlockPath) -> None:
        """Adds its adjustments to the path's adjustments."""
        raise NotImplementedError


class BiasRule(LogitsRule):
    """Adds a constant to the logits of given ids."""

    def __init__(self, logit_bias: Sequence[tuple[int, float]]) -> None:
        self.own_ids = [token_id for token_id, _ in logit_bias]
        self._biases = np.array([bias for _, bias in logit_bias], dtype=np.float32)

    def adjust(self, path: BlockPath) -> None:
        path.bias[:, path.places(self.own_ids)] += self._biases


class RepetitionRule(LogitsRule):
    """Divides positive and multiplies negative logits of ids in prompt + output (CTRL, arXiv:1909.05858)."""

    reads_prompt = True
    reads_output = True

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)

    def adjust(self, path: BlockPath) -> None:
        np.multiply(path.scale, self._penalty, out=path.scale, where=path.in_prompt | (path.counts > 0))


class OccurrenceRule(LogitsRule):
    """Subtracts once for ids in the output, and once more for every occurrence."""

    reads_output = True

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def adjust(self, path: BlockPath) -> None:
        counts = np.arange(path.counts.max(initial=0) + 1)
        totals = self._presence * (counts > 0) + self._frequency * counts
        np.add(path.penalty, totals.astype(np.float32)[path.counts], out=path.penalty)


class MinNewTokensRule(LogitsRule):
    """Masks the ids that would end the answer until it has enough tokens, unless a grammar allows nothing else."""

    def __init__(self, min_new_tokens: int, ending_ids: Sequence[int]) -> None:
        self._min_new_tokens = min_new_tokens
        self.own_ids = ending_ids

    def applies_after(self, num_outputs: int) -> bool:
        return num_outputs < self._min_new_tokens

    def adjust(self, path: BlockPath) -> None:
        is_short = len(path.output_ids) + path.num_drafts < self._min_new_tokens
        if path.allowed is not None:
            is_short &= self._leaves_any(path.allowed)
        path.penalty[np.ix_(is_short, path.places(self.own_ids))] = np.inf

    def _leaves_any(self, allowed: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[rows] whether other ids are allowed too."""
        others = allowed.copy()
        for token_id in self.own_ids:
            if token_id >> 5 < others.shape[1]:
                others[:, token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)
        return np.asarray(others.any(axis=1), dtype=np.bool_)


def make_rules(params: SamplingParams) -> tuple[LogitsRule, ...]:
    """The rules that a request's parameters ask for, in the order they apply."""
    rules: list[LogitsRule] = []
    if params.logit_bias:
        rules.append(BiasRule(params.logit_bias))
    if params.repetition_penalty != 1.0:
        rules.append(RepetitionRule(params.repetition_penalty))
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        rules.append(OccurrenceRule(params.presence_penalty, params.frequency_penalty))
    ending_ids = sorted({*params.eos_token_ids, *params.stop_token_ids})
    if params.min_new_tokens > 0 and ending_ids:
        rules.append(MinNewTokensRule(params.min_new_tokens, ending_ids))
    return tuple(rules)


def follow_rules(
    rules: Sequence[LogitsRule],
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    draft_ids: Sequence[int],
    parents: Sequence[int] | None = None,
) -> BlockPath:
    """Applies rules to the len(draft_ids) + 1 rows of a block: one scan of the output, then an update per draft id.

    Args:
        rules: in the order they apply.
        prompt_ids, output_ids: committed.
        draft_ids: row i + 1 follows draft id i.
        parents: of each draft id, the index of the one it follows, -1 for the committed output; None for a chain.
    """
    num_rows = len(draft_ids) + 1
    if parents is None:
        parents = range(-1, len(draft_ids) - 1)
    reads_output = any(rule.reads_output for rule in rules)
    prompt = prompt_distinct_ids(prompt_ids if any(rule.reads_prompt for rule in rules) else ())
    output = np.asarray(output_ids if reads_output else (), dtype=np.int64)
    drafts = np.asarray(draft_ids if reads_output else (), dtype=np.int64)
    own = np.asarray([token_id for rule in rules for token_id in rule.own_ids], dtype=np.int64)
    token_ids = distinct_ids(np.concatenate((prompt, output, drafts, own)))
    num_ids = len(token_ids)
    in_prompt = np.zeros(num_ids, dtype=np.bool_)
    in_prompt[np.searchsorted(token_ids, prompt)] = True
    counts = np.empty((num_rows, num_ids), dtype=np.int32)
    counts[:] = np.bincount(np.searchsorted(token_ids, output), minlength=num_ids)
    for i, place in enumerate(np.searchsorted(token_ids, drafts)):
        counts[i + 1] = counts[parents[i] + 1]
        counts[i + 1, place] += 1
    path = BlockPath(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        draft_ids=draft_ids,
        parents=parents,
        num_drafts=np.array([0, *(depth + 1 for depth in node_depths(parents))], dtype=np.int64),
        token_ids=token_ids,
        in_prompt=in_prompt,
        counts=counts,
    )
    for rule in rules:
        rule.adjust(path)
    return path
