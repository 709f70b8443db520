"""Drafts for a synthetic target: each token is the target's with a given probability, each forward takes a given time.

Draws are keyed by request seed, position and previous id, so that they depend neither on batches nor on time. Between
drafts it simulates drafting ahead: K + 1 forwards, after which the verification result is a hit or a miss by a draw.
"""

import time
from dataclasses import dataclass

from betoken.common.synthetic import SimulatedTimes, is_drawn, next_id, other_id, probabilities, probability
from betoken.drafters.drafter import Drafted, DraftedAhead, DraftSequence
from betoken.drafters.synthetic.settings import SyntheticSettings

SOURCE = "synthetic"
"""Source name of its tokens: its spec's name."""
_ACCEPTANCE, _HIT = 1, 2
"""Keys of the two kinds of draws."""


@dataclass(slots=True)
class _State:
    """A sequence's draft under way, and its drafts ahead."""

    acceptance: tuple[float, ...]
    hit_rate: float
    num_computed: int = 0
    """Ids that a forward has read."""
    num_wanted: int | None = None
    """Draft tokens wanted; None = no request is open."""
    num_made: int = 0
    """Tokens of the draft under way."""
    num_forwards: int = 0
    num_outcomes: int = 0
    """Outcomes to draft ahead for after the draft under way."""
    num_ahead_left: int = 0
    """Forwards left of drafting ahead."""
    num_ahead: int | None = None
    """Tokens drafted ahead per outcome; None = none are to be."""
    num_ready: int = 0
    """Tokens drafted ahead for the committed text."""
    num_ahead_ids: int | None = None
    num_ahead_tokens: int = 0
    """See `Drafted`."""


class SyntheticDrafter:
    """An `AheadDrafter` without a model."""

    def __init__(self, times: SimulatedTimes, settings: SyntheticSettings | None = None) -> None:
        """`settings`: defaults of sequences without their own."""
        self._times = times
        self._settings = settings or SyntheticSettings()
        self._states: dict[DraftSequence, _State] = {}

    @property
    def has_work(self) -> bool:
        return any(state.num_wanted is not None for state in self._states.values())

    @property
    def has_ahead_work(self) -> bool:
        return any(state.num_ahead_left for state in self._states.values())

    def open(self, sequence: DraftSequence) -> None:
        settings = self._settings.override(sequence.settings)
        self._states[sequence] = _State(probabilities(settings.acceptance), probability(settings.hit_rate))

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """Draw whether the outcome was drafted for."""
        state = self._states[sequence]
        state.num_ready = 0
        if state.num_ahead is not None:
            is_hit = _is_hit(sequence, state, len(sequence.ids), ids[-1])
            state.num_ready = state.num_ahead if is_hit else 0
            state.num_ahead_ids = 0
        state.num_ahead, state.num_ahead_left = None, 0

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        state = self._states[sequence]
        state.num_wanted = num_tokens
        state.num_made, state.num_ready = min(state.num_ready, num_tokens), 0
        if state.num_made:
            state.num_ahead_ids = state.num_made
        state.num_outcomes = 0 if sequence.draft_affects_output else sequence.num_outcomes
        state.num_ahead, state.num_ahead_left = None, 0

    def close(self, sequence: DraftSequence) -> None:
        self._states.pop(sequence, None)

    def step(self) -> list[Drafted]:
        """One forward over every sequence whose draft is incomplete; the drafts that are now complete."""
        drafting = {seq: state for seq, state in self._states.items() if state.num_made < (state.num_wanted or 0)}
        if drafting:
            self._forward(sum(_num_new(seq, state) for seq, state in drafting.items()))
        for seq, state in drafting.items():
            state.num_computed = len(seq.ids) + state.num_made
            state.num_made += 1
            state.num_forwards += 1
        complete = [seq for seq, state in self._states.items() if state.num_made == state.num_wanted]
        return [self._finish(seq, self._states[seq]) for seq in complete]

    def step_ahead(self) -> list[DraftedAhead]:
        """One forward of drafting ahead: the end of the draft first, then a token after each outcome."""
        growing = {seq: state for seq, state in self._states.items() if state.num_ahead_left}
        self._forward(sum(state.num_outcomes if state.num_ahead is not None else 1 for state in growing.values()))
        for state in growing.values():
            state.num_ahead_left -= 1
            state.num_forwards += 1
            if state.num_ahead is None:
                state.num_ahead = 0
            else:
                state.num_ahead += 1
                state.num_ahead_tokens += state.num_outcomes
        found = (_pushed(seq, state) for seq, state in growing.items() if not state.num_ahead_left)
        return [drafted for drafted in found if drafted is not None]

    def check_integrity(self) -> None:
        """It holds nothing to account for."""

    def _forward(self, num_tokens: int) -> None:
        time.sleep(self._times.seconds(num_tokens))

    def _finish(self, sequence: DraftSequence, state: _State) -> Drafted:
        drafted = Drafted(
            sequence,
            _draft_ids(sequence, state.acceptance, state.num_made, len(sequence.ids), sequence.ids[-1]),
            num_forwards=state.num_forwards,
            num_ahead_ids=state.num_ahead_ids,
            num_ahead_tokens=state.num_ahead_tokens,
        )
        state.num_ahead_left = state.num_made + 1 if state.num_outcomes and state.num_made else 0
        state.num_wanted, state.num_made, state.num_forwards = None, 0, 0
        state.num_ahead_ids, state.num_ahead_tokens = None, 0
        return drafted


def _num_new(sequence: DraftSequence, state: _State) -> int:
    """Tokens of the sequence in the next forward, prompt included."""
    return max(1, len(sequence.ids) + state.num_made - state.num_computed)


def _pushed(sequence: DraftSequence, state: _State) -> DraftedAhead | None:
    """The draft after the actual result of the verification; None if it is a miss."""
    assert state.num_ahead is not None
    previous_id, length, end_ids = sequence.ids[-1], len(sequence.ids), sequence.params.eos_token_ids
    for draft_id in (*_draft_ids(sequence, state.acceptance, state.num_ahead, length, previous_id), -1):
        previous_id, length = next_id(length, previous_id, end_ids), length + 1
        if previous_id != draft_id:
            break
    if not _is_hit(sequence, state, length, previous_id):
        return None
    ids = _draft_ids(sequence, state.acceptance, state.num_ahead, length, previous_id)
    return DraftedAhead(sequence, (length, previous_id), ids, SOURCE, state.num_forwards, state.num_ahead_tokens)


def _is_hit(sequence: DraftSequence, state: _State, length: int, last_id: int) -> bool:
    """Whether the drafter has drafted for a verification result that ends so."""
    return is_drawn(state.hit_rate, _HIT, sequence.params.seed, length, last_id)


def _draft_ids(
    sequence: DraftSequence, acceptance: tuple[float, ...], num_tokens: int, length: int, previous_id: int
) -> list[int]:
    """The draft after a text of `length` ids with this last one."""
    params = sequence.params
    ids: list[int] = []
    for index in range(num_tokens):
        chance = acceptance[min(index, len(acceptance) - 1)]
        is_right = is_drawn(chance, _ACCEPTANCE, params.seed, length + index, previous_id)
        token_id = next_id(length + index, previous_id, params.eos_token_ids)
        previous_id = token_id if is_right else other_id(token_id, params.eos_token_ids)
        ids.append(previous_id)
    return ids
