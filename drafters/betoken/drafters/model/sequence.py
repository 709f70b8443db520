"""A model drafter's state of one sequence, and the sequence's part of a forward.

Knows ids, slots and nodes; no logits, no other sequence.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.model.ahead import AheadDraft, Candidates, Continuation
from betoken.drafters.model.settings import ModelSettings
from betoken.drafters.model.tokens import DraftToken
from betoken.drafters.model.tree import ModelTree
from betoken.engine.batch import Segment
from betoken.engine.sparse_probs import SparseProbs


class Guesser(Protocol):
    """Guesses what a draft model will say."""

    @property
    def source(self) -> str:
        """Name of the drafter that makes the guesses."""
        ...

    def follow(self) -> None:
        """The sequence's committed ids have grown."""
        ...

    def guess(self, draft_ids: list[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` guesses at what the model says after the committed ids and `draft_ids`."""
        ...


@dataclass(slots=True)
class DraftKV:
    """The computed part of a sequence in the draft model, and the draft under way."""

    order: int = 0
    """Among all that share the model's pages."""
    idle_since_ns: int = 0
    """When its last draft was finished (`time.perf_counter_ns`)."""
    page_ids: list[int] = field(default_factory=list)
    kv_ids: list[int] = field(default_factory=list)
    """Ids whose KV is written, at positions [0, len(kv_ids)); rows of a tree come after them."""
    settings: ModelSettings = ModelSettings()
    tree: ModelTree | None = None
    """The draft under way, if it is to be a tree."""
    draft_ids: list[int] = field(default_factory=list)
    """The draft under way."""
    draft_probs: list[SparseProbs] = field(default_factory=list)
    """Distribution of each of its ids, for sequences that need it."""
    sources: list[str] = field(default_factory=list)
    """Who proposed each of its ids."""
    guesser: Guesser | None = None
    """Guesses at this model's own tokens."""
    num_forwards: int = 0
    """Forwards that chose tokens of it since its last draft."""
    num_outcomes: int = 0
    """Outcomes of the verification of the draft under way that are drafted for afterwards."""
    candidates: list[Candidates] = field(default_factory=list)
    """Candidates of the ids of the draft under way, if `num_outcomes` > 0; of a PARD model of the first id only, as the
    others' rows do not know the ids before."""
    ahead: AheadDraft | None = None
    """Drafts after the outcomes of the verification under way."""
    ready: Continuation | None = None
    """Draft made ahead for the committed ids."""
    num_ahead_ids: int | None = None
    """Leading ids of the draft under way that were drafted ahead; None = nothing was to be."""
    num_ahead_tokens: int = 0
    """Tokens drafted ahead since the last draft."""
    num_wanted: int | None = None
    """Draft tokens wanted in all; None = no request is open."""
    has_foreign_ids: bool = False
    """Whether the target committed an id this model does not have (a padded vocabulary): nothing is drafted then."""

    @property
    def is_drafting(self) -> bool:
        """Whether the draft under way lacks something."""
        if self.tree is not None:
            return self.tree.is_growing
        return self.num_wanted is not None and len(self.draft_ids) < self.num_wanted

    @property
    def num_positions(self) -> int:
        """Positions of the draft under way: the tokens of its longest path."""
        return self.tree.max_depth if self.tree is not None else self.num_wanted or 0

    @property
    def num_written(self) -> int:
        """Slots that hold KV, including a tree's."""
        return len(self.kv_ids) + (self.tree.num_rows if self.tree is not None else 0)

    def settle(self, ids: Sequence[int]) -> Continuation | None:
        """Select what was drafted ahead for committed `ids`; None if nothing was."""
        found = self.ready.after(ids) if self.ready is not None else None
        if self.ahead is not None:
            self.num_ahead_ids, self.num_ahead_tokens = 0, self.num_ahead_tokens + self.ahead.num_tokens
            found = self.ahead.follow(ids)
        self.ahead, self.ready = None, found
        return found

    def use_ready(self, end_ids: Collection[int], source: str) -> None:
        """Begin the current draft with what was drafted ahead, unless it is a tree. `end_ids` end the answer."""
        ready, self.ready, self.ahead = self.ready, None, None
        if ready is None or self.tree is not None:
            return
        is_short = len(ready.ids) < (self.num_wanted or 0) and ready.ids[-1] not in end_ids
        if ready.is_parallel and is_short:
            return  # one forward drafts all
        ids = ready.ids[: self.num_wanted]
        self.draft_ids, self.candidates, self.sources = ids, ready.candidates[: len(ids)], [source] * len(ids)
        self.num_ahead_ids = len(ids)
        if ids and ids[-1] in end_ids:
            self.num_wanted = len(ids)

    def add_token(self, token: DraftToken, source: str, end_ids: Collection[int]) -> None:
        """Append a token to the current draft, which an end id completes."""
        self.draft_ids.append(token.token_id)
        self.sources.append(source)
        if token.probs is not None:
            self.draft_probs.append(token.probs)
        if token.token_id in end_ids:
            self.num_wanted = len(self.draft_ids)

    def stop(self) -> None:
        """End the current draft."""
        self.num_wanted = len(self.draft_ids)
        if self.tree is not None:
            self.tree.stop()


class Planned(NamedTuple):
    """The sequence's part of a forward."""

    sequence: DraftSequence
    segment: Segment
    nodes: Sequence[int]
    """Tree nodes that the rows of logits follow, if the forward extends a tree; -1 = the last committed token."""

    @property
    def has_tokens(self) -> bool:
        """Whether its rows of logits say the next tokens of a chain."""
        return self.segment.num_logits > 0 and not self.nodes

    @property
    def guesses(self) -> list[int]:
        """The segment's ids that are guesses: its last row but them gives the first token."""
        return list(self.segment.ids[len(self.segment.ids) - self.segment.num_logits + 1 :])


def chain_part(seq: DraftSequence, kv: DraftKV, num_rows: int, guesses: Sequence[int], is_whole: bool) -> Planned:
    """The first `num_rows` ids without KV; `is_whole`: these are all, and `guesses` at what follows, or masks, come
    after them."""
    kv_length = len(kv.kv_ids)
    ids = (seq.ids[kv_length:] + kv.draft_ids[max(0, kv_length - len(seq.ids)) :])[:num_rows]
    num_logits = 1 + len(guesses) if is_whole else 0
    segment = Segment(kv.page_ids, kv_length, [*ids, *guesses], num_logits, num_committed=_num_committed(seq))
    return Planned(seq, segment, [-1] if is_whole and kv.tree is not None else [])


def tree_part(seq: DraftSequence, kv: DraftKV, tree: ModelTree, num_rows: int) -> Planned:
    """The best `num_rows` nodes about which the model is to be asked."""
    kv_length, nodes = kv.num_written, tree.to_expand()[:num_rows]
    ids, parents = tree.add_rows(nodes)
    segment = Segment(kv.page_ids, kv_length, ids, len(ids), parents, num_committed=_num_committed(seq))
    return Planned(seq, segment, nodes)


def _num_committed(seq: DraftSequence) -> int:
    """Committed ids but the last, which may be fed again."""
    return len(seq.ids) - 1
