"""Per sequence and round, the hosted drafter that is expected to bring most tokens per second.

A drafter that answers at once is judged by its confidence in this very draft. Its drafts cost nothing, so its yield is
also learnt while another drafts: the target says the rest. The choice itself is made in `common.economy.sources`.
Knows drafters by their protocol only; their host steps them.
"""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from betoken.common.economy.sources import SequenceSources, Sources
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence
from betoken.drafters.fused.shadow_draft import ShadowDraft
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.settings import check_names

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Source:
    """One drafter as one sequence sees it."""

    drafter: Drafter
    sequence: DraftSequence
    """The drafter's own view of the sequence; the id lists are shared with it."""
    is_open: bool = False
    """Whether the drafter holds it: an immediate drafter from the beginning, so that it can report its confidence,
    others not before they are to draft, so that what is never asked costs nothing."""
    num_wanted: int = 0
    """Tokens of the shadow draft to be made; 0 = none."""
    shadow: ShadowDraft | None = None
    shadow_confidence: int = 0

    def opened(self) -> Drafter:
        """The drafter, with the sequence taken in."""
        if not self.is_open:
            self.drafter.open(self.sequence)
            self.is_open = True
        return self.drafter

    def confidence(self) -> int | None:
        """Confidence of its next draft; 0 if the drafter reports none, None if it does not hold the sequence."""
        if not self.is_open:
            return None
        if not isinstance(self.drafter, ImmediateDrafter):
            return 0
        try:
            return int(self.drafter.confidence(self.sequence))  # each fraction would be a separate kind
        except Exception:  # a fault costs no more than a worse choice
            logger.exception("a drafter's confidence failed")
            return 0

    def most_tokens(self, num_tokens: int) -> int:
        """Most tokens of its draft: a drafter that answers at once may go by the terms instead of the number asked."""
        terms = self.sequence.terms
        return terms.max_tokens if terms is not None and isinstance(self.drafter, ImmediateDrafter) else num_tokens


@dataclass(slots=True)
class _Fused:
    """An open sequence."""

    sources: dict[str, _Source]
    choice: SequenceSources


class FusedDrafter:
    """Composes the other hosted drafters; it has no settings."""

    def __init__(self, sources: Mapping[str, Drafter], clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.sources = dict(sources)
        """See `ComposedDrafter`."""
        self._clock_ns = clock_ns
        immediate = {name for name, drafter in self.sources.items() if isinstance(drafter, ImmediateDrafter)}
        self._economy = Sources(self.sources, immediate)
        self._last_closed: tuple[DraftSequence, str] | None = None
        """Sequence closed while its draft was pending, and its drafter. If it opens again, that drafter failed."""
        self._open: dict[DraftSequence, _Fused] = {}
        self._num_wanted = 0
        """Shadow drafts to be made."""

    @property
    def has_work(self) -> bool:
        """Whether shadow drafts are to be made: while no source drafts, so that none has to wait for them."""
        return self._num_wanted > 0 and not any(drafter.has_work for drafter in self.sources.values())

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        if self._last_closed is not None and self._last_closed[0] is sequence:
            self._economy.fail(self._last_closed[1])
        fused = self._open[sequence] = _Fused({}, self._economy.of_sequence())
        for name, drafter in self.sources.items():
            source = fused.sources[name] = _Source(drafter, copy.copy(sequence))
            if isinstance(drafter, ImmediateDrafter):
                self._open_early(name, source)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        fused = self._open[sequence]
        for name, source in fused.sources.items():
            self._follow(fused, name, ids)
            if source.is_open:
                self._commit_source(name, source, ids)
        fused.choice.end(self._clock_ns(), len(ids), len(sequence.ids))

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        fused = self._open[sequence]
        if sequence.draft_affects_output:
            self._request_first(fused, sequence, num_tokens)
            return
        for source in fused.sources.values():
            source.sequence.takes_trees, source.sequence.terms = sequence.takes_trees, sequence.terms
            source.sequence.num_outcomes = sequence.num_outcomes
        confidences = {name: source.confidence() for name, source in fused.sources.items()}
        name = fused.choice.choose(confidences)
        asked = fused.sources[name]
        now_ns = self._clock_ns()
        for other, source in fused.sources.items():
            if other != name and source.shadow is None and isinstance(source.drafter, ImmediateDrafter):
                self._num_wanted += source.num_wanted == 0
                source.num_wanted = num_tokens
        self._forget_wanted(asked)
        fused.choice.begin(name, now_ns, asked.most_tokens(num_tokens), confidences[name], len(sequence.ids))
        asked.opened().request(asked.sequence, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        fused = self._open.pop(sequence, None)
        if fused is not None:
            asked = fused.choice.asked
            self._last_closed = (sequence, asked) if asked is not None else None
            if sequence.is_waiting:  # a sequence that is about to end is not evidence
                fused.choice.give_up(self._clock_ns())
            for name, source in fused.sources.items():
                self._forget_wanted(source)
                if source.is_open:
                    self._close_source(name, source)

    def views(self, sequence: DraftSequence) -> Mapping[str, DraftSequence]:
        """See `ComposedDrafter`."""
        return {name: source.sequence for name, source in self._open[sequence].sources.items() if source.is_open}

    def step(self) -> list[Drafted]:
        """Make the shadow drafts, which are not answers."""
        for fused in self._open.values():
            for name, source in fused.sources.items():
                if source.num_wanted:
                    self._draft_shadow(name, source)
        return []

    def check_integrity(self) -> None:
        """The sources account for what they hold."""

    def _request_first(self, fused: _Fused, sequence: DraftSequence, num_tokens: int) -> None:
        """Ask the first source, always: a choice by speed would make the tokens depend on the clock."""
        source = next(iter(fused.sources.values()))
        source.sequence.takes_trees = sequence.takes_trees
        source.opened().request(source.sequence, num_tokens)

    def _open_early(self, name: str, source: _Source) -> None:
        try:
            source.opened()
        except Exception:  # it will be tried again when it is to draft
            logger.exception("drafter %s failed", name)

    def _commit_source(self, name: str, source: _Source, ids: list[int]) -> None:
        """A failed source is opened again when it is to draft; the others keep their state."""
        try:
            source.drafter.commit(source.sequence, ids)
        except Exception:
            logger.exception("drafter %s failed", name)
            self._close_source(name, source)
            source.is_open = False

    @staticmethod
    def _close_source(name: str, source: _Source) -> None:
        try:
            source.drafter.close(source.sequence)
        except Exception:  # the others still have to free what they hold
            logger.exception("drafter %s failed", name)

    def _draft_shadow(self, name: str, source: _Source) -> None:
        num_tokens = source.num_wanted
        self._forget_wanted(source)
        try:
            drafter = source.opened()
            assert isinstance(drafter, ImmediateDrafter), "shadow drafts are wanted of such only"
            drafted = drafter.propose(source.sequence, num_tokens)
            drafted.check()
        except Exception:  # like a failed request, it disturbs no stream
            logger.exception("drafter %s failed", name)
            return
        if drafted.draft_ids or source.sequence.terms is None:  # steps without a draft would follow an empty one
            source.shadow, source.shadow_confidence = ShadowDraft(drafted), source.confidence() or 0

    def _forget_wanted(self, source: _Source) -> None:
        self._num_wanted -= source.num_wanted > 0
        source.num_wanted = 0

    def _follow(self, fused: _Fused, name: str, ids: list[int]) -> None:
        """Learn from a finished shadow draft; late ones are dropped."""
        source = fused.sources[name]
        self._forget_wanted(source)
        if source.shadow is not None and (num_tokens := source.shadow.follow(ids)) is not None:
            fused.choice.count(name, source.shadow_confidence, num_tokens)
            source.shadow = None
