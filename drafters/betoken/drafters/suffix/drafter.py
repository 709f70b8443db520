"""Drafts from earlier texts of the same tenant, or from the sequence's own text as `ngram`, whichever promises more.

Texts enter the memory when their sequences close. Sequences whose tokens depend on drafts use the corpus alone, since
the same request must get the same draft. Needs no model and no device.
Source: Oliaro et al., "SuffixDecoding", arXiv:2411.04975.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from betoken.common.economy.acceptance import Calibration
from betoken.common.economy.memory_counts import MemoryCounts
from betoken.common.economy.terms import DraftTerms
from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.ngram.drafter import NgramDrafter, NgramLookup
from betoken.drafters.ngram.prediction import Prediction
from betoken.drafters.suffix.memory import SuffixMemory
from betoken.drafters.suffix.recall import grow_continuations
from betoken.drafters.suffix.settings import MAX_MATCH, SuffixSettings

SOURCE = "suffix"
"""Source name of tokens from memory: the drafter's name in its spec."""


class _Recalled(NamedTuple):
    """A draft from memory."""

    asked: tuple[DraftTerms | int, bool]
    """Terms or number of tokens, and whether it may be a tree."""
    base_length: int
    """Length of the text that it continues."""
    draft_ids: list[int]
    parents: list[int]
    shares: list[float]
    scores: list[float]
    """Shares as corrected; none if the draft does not pay."""


class SuffixLookup(NgramLookup):
    """One sequence's text, and its continuations in the memory."""

    def __init__(
        self,
        sequence: DraftSequence,
        settings: SuffixSettings,
        memory: SuffixMemory,
        calibrations: tuple[Calibration, Calibration, Calibration],
        prediction: Prediction | None,
    ) -> None:
        """`calibrations`: of the sequences' own texts, of predictions and of the memory."""
        self.num_known = len(sequence.ids)
        """Leading ids that were committed when the sequence was opened."""
        self._sequence = sequence
        self._memory = memory
        self._suffix_settings = settings
        self._recalled: _Recalled | None = None
        of_text, of_predictions, self._of_memory = calibrations
        super().__init__(settings, sequence.ids, of_text, prediction, of_predictions)

    def follow(self) -> None:
        if (last := self._recalled) is not None:
            self._of_memory.learn(last.draft_ids, last.parents, last.shares, self._sequence.ids[last.base_length :])
            self._recalled = None
        super().follow()

    def recall(self, num_tokens: int, takes_trees: bool, terms: DraftTerms | None) -> _Recalled:
        """The draft from memory, without ids if there is none or it does not pay; made once until the text grows."""
        asked = terms or num_tokens, takes_trees
        if self._recalled is None or self._recalled.asked != asked:
            num_nodes = num_tokens if terms is None else terms.max_tokens
            draft = self._grow(num_nodes, takes_trees, 0.0 if terms is None else terms.row_price)
            scores = [self._of_memory.score(share) for share in draft[2]]
            if terms is not None and not terms.is_worth(scores):
                draft, scores = ([], [], []), []
            self._recalled = _Recalled(asked, len(self._sequence.ids), *draft, scores)
        return self._recalled

    def expected_accepted(self, takes_trees: bool, terms: DraftTerms) -> float | None:
        own = super().expected_accepted(takes_trees, terms)
        if own is None:  # a chain of the own text's most recent continuations
            length = super().match_length()
            num_tokens = min(terms.max_tokens, length * self._suffix_settings.draft_factor or terms.max_tokens)
            own = sum(self.chain_scores(num_tokens if length else 0, is_corrected=True))
        return max(own, sum(self.recall(terms.max_tokens, takes_trees, terms).scores))

    def match_length(self) -> int:
        recalled = self._memory.find(self._sequence.tenant, self._sequence.ids[-MAX_MATCH:], 1)
        return max(super().match_length(), 0 if recalled is None else recalled.length)

    def _grow(self, num_nodes: int, takes_trees: bool, row_price: float) -> tuple[list[int], list[int], list[float]]:
        sequence, settings = self._sequence, self._suffix_settings
        tail = sequence.ids[-MAX_MATCH:]
        match = self._memory.find(sequence.tenant, tail, num_nodes, corpus_only=sequence.draft_affects_output)
        if match is None or match.length < settings.min_match:
            return [], [], []
        return grow_continuations(
            match,
            num_nodes=num_nodes,
            max_branches=settings.max_branches if takes_trees else 1,
            max_depth=settings.max_depth(match.length, num_nodes),
            min_score=max(self._of_memory.share(row_price), settings.min_percent / 100),
        )


class SuffixDrafter(NgramDrafter):
    """Answers each request from the memory or the sequence's own text. Settings: the fields of `SuffixSettings`."""

    def __init__(self, memory: SuffixMemory, settings: SuffixSettings | None = None) -> None:
        self._suffix_settings = settings or SuffixSettings()
        super().__init__(self._suffix_settings)
        self._memory = memory
        self._of_memory = Calibration()

    @property
    def memory_counts(self) -> MemoryCounts:
        """Contents of its memory."""
        return self._memory.counts

    def close(self, sequence: DraftSequence) -> None:
        lookup = self._lookups.get(sequence)
        super().close(sequence)
        if isinstance(lookup, SuffixLookup) and sequence.branch is None:
            self._memory.remember(sequence.tenant, sequence.ids, lookup.num_known)

    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        own, lookup, terms = super().propose(sequence, num_tokens), self._lookups[sequence], sequence.terms
        assert isinstance(lookup, SuffixLookup), "made below"
        recalled = lookup.recall(num_tokens, sequence.takes_trees, terms)
        is_corrected = not sequence.draft_affects_output  # results of others must not choose its draft
        scores = recalled.scores if is_corrected else recalled.shares
        row_price = 0.0 if terms is None else terms.row_price
        if _gain(scores, row_price) <= _gain(lookup.scores(own.draft_ids, is_corrected), row_price):
            return own
        self._memory.hit()
        return Drafted(sequence, recalled.draft_ids, unless_chain(recalled.parents), [SOURCE])

    def check_integrity(self) -> None:
        self._memory.check_integrity()

    def _lookup_of(self, sequence: DraftSequence, prediction: Prediction | None) -> NgramLookup:
        settings = self._suffix_settings.override(sequence.settings)
        calibrations = self._calibration, self._of_predictions, self._of_memory
        return SuffixLookup(sequence, settings, self._memory, calibrations, prediction)


def _gain(scores: Sequence[float], row_price: float) -> float:
    """Tokens expected beyond the price of the draft's."""
    return sum(scores) - len(scores) * row_price
