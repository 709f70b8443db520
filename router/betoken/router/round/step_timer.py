"""Reports one request's token rate to the speculation policy, with and without drafts. Mixed steps are dropped.

Knows steps and times, no clock; decides nothing.
"""

from __future__ import annotations

from enum import Enum, auto

from betoken.common.economy.policy import SpeculationPolicy, Step
from betoken.common.step_times import NO_TIMES, ForwardTimes


class _Asked(Enum):
    """The requests to a draft worker since the last commit."""

    NOTHING = auto()
    DRAFT = auto()
    FIRST_DRAFT = auto()
    """A draft that includes the prompt's prefill."""


class StepTimer:
    """The steps of one request, as the speculation policy receives them."""

    def __init__(self, policy: SpeculationPolicy | None, *, is_named: bool = False) -> None:
        """`policy`: receives token rates; None = unused. `is_named`: drafts made while the policy is off are trials of
        a named drafter, and not the rest of drafting that has just ended."""
        self._policy, self._is_named = policy, is_named
        self._asked = _Asked.NOTHING
        self._num_draft_tokens = 0
        self._waiting_s = 0.0
        """Length of the draft that came since the last commit, and the wait for it, seconds."""
        self.is_tried = False
        """Whether drafts are made whatever the policy says, because their speed is measured."""
        self._is_speculating = False
        """Whether the request goes by drafts: plain steps that follow an empty one belong to it."""

    def asks(self, *, is_first: bool) -> None:
        """A draft is asked for; `is_first`: the prompt's prefill is part of it."""
        self._asked = _Asked.FIRST_DRAFT if is_first else _Asked.DRAFT

    def came(self, num_draft_tokens: int, waiting_s: float) -> None:
        """A draft came, an empty one included, `waiting_s` after it was asked for."""
        self._num_draft_tokens, self._waiting_s = num_draft_tokens, waiting_s

    def commit(
        self,
        num_tokens: int,
        began_s: float | None,
        now_s: float,
        times: ForwardTimes = NO_TIMES,
        *,
        can_draft: bool,
    ) -> bool | None:
        """A step that began at `began_s` (seconds, as `now_s`; None = its time says nothing) brought its tokens.
        Return whether it was made with drafts; None = its time says nothing.

        Args:
            times: as in `Step`.
            can_draft: whether a draft worker has the request open and is not late.
        """
        asked, self._asked = self._asked, _Asked.NOTHING
        num_rows, waiting_s = 1 + self._num_draft_tokens, self._waiting_s
        self._num_draft_tokens, self._waiting_s = 0, 0.0
        policy = self._policy
        is_on = policy is None or policy.is_on
        is_going_on = self._is_speculating and (is_on or self.is_tried) and can_draft
        self._is_speculating = asked is not _Asked.NOTHING or is_going_on
        if began_s is None or asked is _Asked.FIRST_DRAFT:
            return None
        if policy is None:
            return self._is_speculating
        step = Step(began_s, now_s, num_tokens, num_rows, waiting_s, times)
        if self._is_speculating == policy.is_on:
            policy.record(step)
        elif num_rows > 1 and (self._is_named or self.is_tried):
            policy.learn(step)
        return self._is_speculating
