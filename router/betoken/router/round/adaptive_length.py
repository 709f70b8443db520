"""Draft length of one request: the request's own, or the length that pays at present."""

from __future__ import annotations

from betoken.common.economy.draft_length import SequenceDraftLength
from betoken.common.economy.policy import SpeculationPolicy
from betoken.common.economy.terms import USUAL_DRAFT_TOKENS
from betoken.common.step_times import ForwardTimes
from betoken.router.workers.draft import Draft


class AdaptiveLength:
    """Draft length of one request, decided for all running sequences together."""

    def __init__(self, num_draft_tokens: int, policy: SpeculationPolicy | None) -> None:
        """`num_draft_tokens`: the request's; 0 = adaptive. `policy`: None = five tokens."""
        self._num_draft_tokens = num_draft_tokens
        self._policy = policy
        self._length: SequenceDraftLength | None = None
        """None before the first adaptive draft."""
        self._opened = 0, 0.0
        """Tokens of the sequence when it was opened, and when."""

    @property
    def is_paused(self) -> bool:
        """Whether the sequence decodes without drafts for now."""
        return self._length is not None and self._length.is_paused

    def pays_opening(self, num_tokens: int, num_left: int, times: ForwardTimes) -> bool:
        """Return whether drafts for the rest of the answer save more time than opening the sequence takes; if not,
        drafting pauses."""
        if self._policy is None or self._policy.pays_opening(num_tokens, num_left, times):
            return True
        self._length = self._length or self._policy.open_sequence()
        self._length.pause()
        return False

    def opens(self, num_tokens: int, now_s: float) -> None:
        """A draft worker was sent the sequence of `num_tokens`."""
        self._opened = num_tokens, now_s

    def came_first(self, now_s: float) -> None:
        """The first draft since then has arrived."""
        num_tokens, opened_s = self._opened
        if self._policy is not None:
            self._policy.add_opening(num_tokens, now_s - opened_s)

    def next(self, times: ForwardTimes, room: int, *, can_pause: bool) -> int:
        """Return the length of the next draft; 0 pauses drafting if that is allowed."""
        time = self._policy.round_time(times) if self._policy is not None else None
        if self._num_draft_tokens or self._policy is None or time is None:
            return self._num_draft_tokens or USUAL_DRAFT_TOKENS
        self._length = self._length or self._policy.open_sequence()
        return self._length.next(time, room, can_pause=can_pause and self._policy.can_pause)

    def came(self, draft: Draft, waited_s: float) -> None:
        """Add the times of a draft that arrived."""
        if self._policy is not None:
            is_hit = bool(draft.num_ahead_ids)
            drafting_s = draft.forward_ns * 1e-9
            self._policy.add_draft(len(draft.ids), draft.num_forwards, waited_s, drafting_s, is_hit=is_hit)

    def verified(self, draft: Draft, num_accepted: int) -> None:
        """Add the result of a draft to the realised accepts."""
        if self._length is not None and draft.num_forwards and not draft.parents:
            self._length.add(len(draft.ids), num_accepted)

    def add_tokens(self, num_tokens: int) -> None:
        """Add committed tokens."""
        if self._length is not None:
            self._length.add_tokens(num_tokens)

    def end(self) -> None:
        """Leave the running sequences, until the next draft."""
        if self._length is not None:
            self._length.close()
        self._length = None
