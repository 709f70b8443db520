"""Prompt lookup: the text repeats itself, so continue the way earlier occurrences of the last few tokens went on.

The client's prediction is looked up in the same way, if it matches at least as well.

Source: Saxena, "Prompt Lookup Decoding" (2023). Here it looks through prompt and output: longest match first, then the
most recent occurrence, or a tree of the most frequent continuations if the target supports trees. Needs no model and no
device.
"""

from collections.abc import Sequence
from typing import NamedTuple

from betoken.common.economy.acceptance import Calibration
from betoken.common.economy.terms import DraftTerms
from betoken.common.names import PREDICTION
from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.ngram.prediction import Place, Prediction, grow_places
from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.ngram.suffix_automaton import SuffixAutomaton
from betoken.drafters.ngram.tree import grow_tree

SOURCE = "ngram"
"""Source name of its tokens: its spec's name."""

_MAX_IDS_AT_ONCE = 2048
"""Taken in between two looks at what else is to be drafted: some 10 ms. Other sequences' drafts wait meanwhile."""
_MAX_CONFIDENCE = 6
"""Confidence of matches of 32 tokens and more: they are seldom wrong."""


class _ScoredDraft(NamedTuple):
    asked: DraftTerms | int
    """For these terms, or that number of tokens."""
    draft_ids: list[int]
    parents: list[int]
    shares: list[float]
    scores: list[float]
    """Shares as corrected."""
    calibration: Calibration
    """Calibration that corrected them and learns from the draft's result."""


class NgramLookup:
    """One sequence's text, and its likely continuations."""

    source = SOURCE

    def __init__(
        self,
        settings: NgramSettings,
        ids: list[int],
        calibration: Calibration | None = None,
        prediction: Prediction | None = None,
        of_predictions: Calibration | None = None,
    ) -> None:
        """Follows `ids`, to which the caller appends; `calibration` is shared by all sequences, and
        `of_predictions` by their predictions. `prediction`: has followed the output among `ids`."""
        self._settings = settings
        self._ids = ids
        self._calibration = calibration or Calibration()
        self._prediction = prediction
        self._of_predictions = of_predictions or Calibration()
        self._last: _ScoredDraft | None = None
        """The last draft that came with scores; none since the text grew."""
        self._automaton = SuffixAutomaton()
        self.follow()

    @property
    def is_current(self) -> bool:
        """Whether all of the text is indexed; matches exist only then."""
        return self._automaton.num_ids == len(self._ids)

    def follow(self) -> None:
        """Take in what was appended, or a part of it that takes no long time."""
        num_ids = self._automaton.num_ids
        new_ids = self._ids[num_ids : num_ids + _MAX_IDS_AT_ONCE]
        if self._last is not None:
            self._last.calibration.learn(self._last.draft_ids, self._last.parents, self._last.shares, new_ids)
            self._last = None
        self._automaton.extend(new_ids)

    def follow_prediction(self, ids: Sequence[int]) -> None:
        """The output went on with `ids`."""
        if self._prediction is not None:
            self._prediction.follow(ids)

    @property
    def is_predicted(self) -> bool:
        """Whether the next draft is out of the prediction."""
        return bool(self._places(self._match()))

    def propose(
        self, num_tokens: int, takes_trees: bool, terms: DraftTerms | None = None
    ) -> tuple[list[int], list[int] | None]:
        """At most `num_tokens` ids, or a number chosen under `terms`, and their parents if they form a tree.

        A chain of the most recent continuations has no scores, so terms do not apply to it.
        """
        settings = self._settings
        state, length = match = self._match()
        if places := self._places(match):
            return self._propose_predicted(places, num_tokens, takes_trees, terms)
        if length < settings.min_ngram:
            return [], None
        if not takes_trees or settings.max_branches == 1:
            return self._chain(state, min(num_tokens, length * settings.draft_factor or num_tokens)), None
        draft = self._scored(num_tokens, terms, (state, length))
        if terms is not None and not terms.is_worth(draft.scores):
            return [], None
        return draft.draft_ids, unless_chain(draft.parents)

    def _propose_predicted(
        self, places: Sequence[Place], num_tokens: int, takes_trees: bool, terms: DraftTerms | None
    ) -> tuple[list[int], list[int] | None]:
        draft = self._scored_places(places if takes_trees else places[:1], num_tokens, terms)
        if terms is not None and not terms.is_worth(draft.scores):
            return [], None
        return draft.draft_ids, unless_chain(draft.parents)

    def match_length(self) -> int:
        """Tokens of the longest match, 0 without a match."""
        match = self._match()
        if places := self._places(match):
            return places[0].length
        return match[1] if match[1] >= self._settings.min_ngram else 0

    def expected_accepted(self, takes_trees: bool, terms: DraftTerms) -> float | None:
        """Tokens expected to be accepted of a draft under `terms`; 0 if it would be empty, None = unknown."""
        settings = self._settings
        match = self._match()
        if places := self._places(match):
            scores = self._scored_places(places if takes_trees else places[:1], terms.max_tokens, terms).scores
        elif not takes_trees or settings.max_branches == 1:
            return None
        elif match[1] < settings.min_ngram:
            return 0.0
        else:
            scores = self._scored(terms.max_tokens, terms, match).scores
        return sum(scores) if terms.is_worth(scores) else 0.0

    def scores(self, draft_ids: list[int], is_corrected: bool) -> list[float]:
        """How likely each token of the last draft is accepted, corrected by results of earlier drafts or not."""
        if self._last is not None and self._last.draft_ids == draft_ids:
            return self._last.scores if is_corrected else self._last.shares
        return self.chain_scores(len(draft_ids), is_corrected)

    def chain_scores(self, num_tokens: int, is_corrected: bool) -> list[float]:
        """Scores of a chain of the most recent continuations, as if no other continuation had occurred."""
        length = self._match()[1]
        shares = [length / (length + depth) for depth in range(1, num_tokens + 1)]
        return [self._calibration.score(share) for share in shares] if is_corrected else shares

    def _scored(self, num_tokens: int, terms: DraftTerms | None, match: tuple[int, int]) -> "_ScoredDraft":
        """The tree for that number, or for the terms, made once."""
        asked = terms or num_tokens
        if self._last is None or self._last.asked != asked:
            num_nodes = num_tokens if terms is None else terms.max_tokens
            draft_ids, parents, shares = grow_tree(
                self._automaton,
                self._ids,
                match,
                num_nodes=num_nodes,
                max_branches=self._settings.max_branches,
                max_depth=min(num_nodes, match[1] * self._settings.draft_factor or num_nodes),
                min_score=0.0 if terms is None else self._calibration.share(terms.row_price),
            )
            scores = [self._calibration.score(share) for share in shares]
            self._last = _ScoredDraft(asked, draft_ids, parents, shares, scores, self._calibration)
        return self._last

    def _scored_places(self, places: Sequence[Place], num_tokens: int, terms: DraftTerms | None) -> "_ScoredDraft":
        """The automaton of the prediction; made once."""
        asked, calibration = terms or num_tokens, self._of_predictions
        assert self._prediction is not None
        if self._last is None or self._last.asked != asked:
            draft_ids, parents, shares = grow_places(
                self._prediction,
                places,
                num_nodes=num_tokens if terms is None else terms.max_tokens,
                draft_factor=self._settings.draft_factor,
                min_score=0.0 if terms is None else calibration.share(terms.row_price),
            )
            scores = [calibration.score(share) for share in shares]
            self._last = _ScoredDraft(asked, draft_ids, parents, shares, scores, calibration)
        return self._last

    def guess(self, draft_ids: list[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` ids, as a chain, after `draft_ids` more than the text has."""
        settings = self._settings
        match = self._match()
        for draft_id in draft_ids:
            match = self._automaton.read(match, draft_id)
        state, length = match
        if length < settings.min_ngram:
            return []
        position = self._automaton.next_position(state)
        return self._ids[position : position + min(num_tokens, length * settings.draft_factor or num_tokens)]

    def _places(self, match: tuple[int, int]) -> Sequence[Place]:
        """Positions at which the output may continue in the prediction; none if the text's own `match` is longer."""
        places = self._prediction.places if self._prediction is not None else ()
        return places if places and places[0].length >= match[1] else ()

    def _match(self) -> tuple[int, int]:
        if not self.is_current:
            return 0, 0
        max_ngram = self._settings.max_ngram
        return self._automaton.match(self._ids[-max_ngram:] if max_ngram else None)

    def _chain(self, state: int, num_tokens: int) -> list[int]:
        """The continuation of the most recent occurrence; at the end of the text it repeats with its own
        period."""
        position = self._automaton.next_position(state)
        period = len(self._ids) - position
        return [self._ids[position + index % period] for index in range(num_tokens)]


class NgramDrafter(ImmediateDrafter):
    """Answers each request from the sequence's own text. Settings: the fields of `NgramSettings`."""

    def __init__(self, settings: NgramSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or NgramSettings()
        self._calibration = Calibration()
        self._of_predictions = Calibration()
        self._lookups: dict[DraftSequence, NgramLookup] = {}
        self._behind: dict[DraftSequence, None] = {}
        """Sequences whose text is not wholly indexed yet, in order of arrival."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._behind)

    def open(self, sequence: DraftSequence) -> None:
        prediction = Prediction(sequence.predicted_ids) if sequence.predicted_ids else None
        if prediction is not None:
            prediction.follow(sequence.output_ids)
        self._lookups[sequence] = self._lookup_of(sequence, prediction)
        self._note_if_behind(sequence)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        self._lookups[sequence].follow_prediction(ids)
        self._lookups[sequence].follow()
        self._note_if_behind(sequence)

    def close(self, sequence: DraftSequence) -> None:
        super().close(sequence)
        self._lookups.pop(sequence, None)
        self._behind.pop(sequence, None)

    def step(self) -> list[Drafted]:
        """Take in a part of one long text, and answer every request of others."""
        if self._behind:
            sequence = next(iter(self._behind))
            self._lookups[sequence].follow()
            self._note_if_behind(sequence)
        waiting = {sequence: self._requests.pop(sequence) for sequence in self._behind if sequence in self._requests}
        answers = super().step()
        self._requests |= waiting
        return answers

    def _lookup_of(self, sequence: DraftSequence, prediction: Prediction | None) -> NgramLookup:
        settings = self._settings.override(sequence.settings)
        return NgramLookup(settings, sequence.ids, self._calibration, prediction, self._of_predictions)

    def _note_if_behind(self, sequence: DraftSequence) -> None:
        if self._lookups[sequence].is_current:
            self._behind.pop(sequence, None)
        else:
            self._behind[sequence] = None

    def confidence(self, sequence: DraftSequence) -> int:
        """Under terms it grows with the expected number of accepted tokens: 0 for an empty draft, 1 below one, then 1,
        2 to 3, 4 to 7 and so on. Otherwise with the match: 0 without one, then 1, 2 to 3 tokens and so on."""
        lookup = self._lookups[sequence]
        if sequence.terms is not None:
            expected = lookup.expected_accepted(sequence.takes_trees, sequence.terms)
            if expected is not None:
                return 1 + int(expected).bit_length() if expected else 0
        return min(_MAX_CONFIDENCE, lookup.match_length().bit_length())

    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        lookup = self._lookups[sequence]
        draft_ids, parents = lookup.propose(num_tokens, sequence.takes_trees, sequence.terms)
        return Drafted(sequence, draft_ids, parents, [PREDICTION if lookup.is_predicted else SOURCE])
