"""The `Drafter` protocol: one way of guessing, for any number of sequences. Knows no links and no target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from opentelemetry.trace import INVALID_SPAN, Span

from betoken.common.economy.memory_counts import MemoryCounts
from betoken.common.economy.terms import DraftTerms
from betoken.common.tree import num_sound
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.link.worker_load import SequenceKey

if TYPE_CHECKING:
    from betoken.engine.rules.sequence_rules import SequenceRules

RequestKey = tuple[int, int]
"""Key of a request within its sequence, (base length, next id): the draft continues a text of that length, and its last
id is the next id of the verification before it."""

MAX_TOKEN_ID = 1 << 31
_NO_NODE = -2

MAX_SOURCE_BYTES = 64
"""Longest name of a source, UTF-8 bytes."""


class TargetHistory(NamedTuple):
    """Text before a draft token, in the target's ids: the token's noise and logits processors depend on it."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Committed output and the draft so far."""
    rules: "SequenceRules | None"


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One open sequence as every drafter sees it; equal to itself only, so that it is a key."""

    key: SequenceKey
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: list[int]
    max_length: int
    """Largest prompt + output, tokens."""
    settings: dict[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    """Deadline, seconds of `time.monotonic`; None = none."""
    takes_trees: bool = False
    """Whether the target takes trees; as the last request said."""
    terms: DraftTerms | None = None
    """Limits of a draft for a drafter that estimates acceptance probabilities, instead of the number
    asked for; as the last request said. None: that number."""
    num_outcomes: int = 0
    """Outcomes of the verification of a draft that the drafter continues while no draft is requested, if it can; as
    the last request said."""
    wants_probs: bool = False
    """Whether each draft token should come with the distribution it was sampled from (verification by rejection)."""
    draft_affects_output: bool = False
    """Whether the target's tokens depend on the draft (verification other than by equality): the same request should
    get the same draft every time."""
    is_waiting: bool = False
    """Whether a request of it is unanswered."""
    predicted_ids: Sequence[int] = ()
    """Predicted output, perhaps with differences; empty = none."""
    tenant: bytes = b""
    """Opaque id of its tenant; empty = not known."""
    rules: "SequenceRules | None" = None
    """Logits processors, constraint included; None if no model of the worker needs them."""
    has_shared_rules: bool = False
    """Whether `rules` belong to the target's sequence, which commits to them itself."""
    target_kv: Callable[[], tuple[Sequence[int], int]] | None = None
    """Returns its pages in the target's KV cache at the moment, and the number of leading tokens in them; not kept, as
    a preemption takes them away. None: the cache cannot be read."""
    branch: RequestKey | None = None
    """Request that this copy with hypothetical ids belongs to; None for the committed text."""
    span: Span = INVALID_SPAN
    """Ends when the sequence does."""
    ids: list[int] = field(init=False)
    """Prompt + committed output."""

    def __post_init__(self) -> None:
        self.ids = [*self.prompt_ids, *self.output_ids]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end the answer; nothing follows them."""
        return () if self.params.ignore_eos else self.params.eos_token_ids

    def commit(self, ids: Sequence[int]) -> None:
        """Append decided ids."""
        self.ids.extend(ids)
        self.output_ids.extend(ids)
        if self.rules is not None and not self.has_shared_rules:
            self.rules.commit(ids)

    def history(self, draft_ids: Sequence[int]) -> TargetHistory:
        """Return the text before the token that follows `draft_ids`."""
        return TargetHistory(self.prompt_ids, [*self.output_ids, *draft_ids], self.rules)

    def branched(self, ahead_ids: Sequence[int]) -> "DraftSequence":
        """A copy in which `ahead_ids` are committed too; the copy's rules are its own."""
        output_ids = [*self.output_ids, *ahead_ids]
        rules = None if self.rules is None else self.rules.branched(self.params, output_ids, len(ahead_ids))
        key = len(self.ids) + len(ahead_ids), ahead_ids[-1]
        return replace(self, output_ids=output_ids, rules=rules, has_shared_rules=False, branch=key)


@dataclass(slots=True)
class Drafted:
    """A draft block: `draft_ids` [K] continue the committed ids the drafter was asked after; K may be 0."""

    sequence: DraftSequence
    draft_ids: list[int]
    parents: list[int] | None = None
    """[K] index of each node's parent, -1 = the last committed token, parents before children; None = a chain. Only
    if the sequence supports trees."""
    sources: Sequence[str] | None = None
    """Names of the drafters that proposed the tokens: one for all, or [K]; None = the drafter that was asked."""
    draft_probs: Sequence[SparseProbs] = ()
    """[K] distribution of each token, if the sequence needs it; empty = each was certain."""
    num_forwards: int = 0
    """Forwards that chose tokens of this sequence since its last block; prefill excluded."""
    num_ahead_ids: int | None = None
    """Leading ids that were drafted ahead, before the verification of the last draft ended; None = none were to be."""
    num_ahead_tokens: int = 0
    """Tokens drafted ahead since the last draft, for all outcomes."""

    def check(self) -> None:
        """Raises:
        ValueError: the lists do not fit each other, an id is out of range, or a parent comes after its child.
        """
        # Of numbers the type itself: a truth value is an `int` too, but no message takes it.
        num_nodes = len(self.draft_ids)
        if not all(type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in self.draft_ids):
            raise ValueError("draft_ids: not all are token ids")
        for name in ("num_forwards", "num_ahead_tokens"):
            if type(count := getattr(self, name)) is not int or not 0 <= count < MAX_TOKEN_ID:
                raise ValueError(f"{name}: {count!r} is not a count")
        if self.num_ahead_ids is not None and self.num_ahead_ids not in range(num_nodes + 1):
            raise ValueError(f"num_ahead_ids: {self.num_ahead_ids!r} of {num_nodes} draft ids")
        for sparse in self.draft_probs:
            if not all(type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in sparse.token_ids):
                raise ValueError("draft_probs: not all are of token ids")
            if not all(isinstance(prob, float) or prob in (0, 1) for prob in sparse.probs):
                raise ValueError("draft_probs: not all are numbers")
        if self.sources is not None:
            are_names = all(
                type(source) is str and 0 < len(source.encode()) <= MAX_SOURCE_BYTES for source in self.sources
            )
            if len(self.sources) not in (1, num_nodes) or not are_names:
                raise ValueError(f"{num_nodes} draft ids with sources {self.sources}")
        if self.draft_probs and (len(self.draft_probs) != num_nodes or self.parents is not None):
            raise ValueError(f"{num_nodes} draft ids with {len(self.draft_probs)} distributions; chains only")
        if self.parents is None:
            return
        if len(self.parents) != num_nodes:
            raise ValueError(f"{num_nodes} draft ids with {len(self.parents)} parents")
        parents = [parent if type(parent) is int else _NO_NODE for parent in self.parents]
        if (index := num_sound(parents)) < num_nodes:
            raise ValueError(f"parents[{index}] = {self.parents[index]!r}: must be an integer, -1 to {index - 1}")


@dataclass(slots=True)
class DraftedAhead:
    """A draft that continues a possible result of the verification under way."""

    sequence: DraftSequence
    key: RequestKey
    """Key of the request that the draft answers if the result is this one."""
    draft_ids: list[int]
    source: str
    """Name of the drafter."""
    num_forwards: int
    """See `Drafted`."""
    num_ahead_tokens: int
    """Tokens drafted ahead so far, for all outcomes."""

    def to_drafted(self) -> Drafted:
        """The draft, as the response to its request.

        Raises:
            ValueError: see `Drafted.check`.
        """
        num_ids, num_tokens = len(self.draft_ids), self.num_ahead_tokens
        sources = (self.source,)
        drafted = Drafted(self.sequence, self.draft_ids, None, sources, (), self.num_forwards, num_ids, num_tokens)
        drafted.check()
        return drafted


class Drafter(Protocol):
    """Proposes draft blocks. Called on the model thread only.

    Requests are queued and answered by `step`, so that a drafter may batch over sequences and interleave long prefills
    with short drafts. At most one request of a sequence is open at a time.
    """

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def open(self, sequence: DraftSequence) -> None:
        """Take a sequence in. Raises InvalidArgumentError for settings this drafter does not know or cannot honour."""
        ...

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """The target decided `ids`; they are the tail of `sequence.ids` already."""
        ...

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        """Queue a draft of at most `num_tokens` after all committed ids; of a tree, that many nodes in all.

        A drafter that estimates acceptance probabilities may use `sequence.terms` instead.
        """
        ...

    def close(self, sequence: DraftSequence) -> None:
        """Forget the sequence and free what it holds."""
        ...

    def step(self) -> list[Drafted]:
        """Do one unit of work (at most one forward) and return the drafts it finished."""
        ...

    def check_integrity(self) -> None:
        """Re-derive what the drafter accounts for (its KV pages); raises when it is off."""
        ...


class AheadDrafter(Drafter, Protocol):
    """A drafter that drafts ahead while the target verifies (`DraftSequence.num_outcomes`).

    `commit` selects what was drafted for the actual outcome, and the next `request` begins with it.
    """

    @property
    def has_ahead_work(self) -> bool:
        """Whether `step_ahead` has something to do."""
        ...

    def step_ahead(self) -> list[DraftedAhead]:
        """Run at most one forward that drafts ahead; return the drafts that it completed. Called only while no request
        is open."""
        ...


class ComposedDrafter(Drafter, Protocol):
    """A drafter that leaves the work to other hosted drafters."""

    sources: dict[str, Drafter]
    """The other drafters by name; a host may replace them between two steps while no sequence is open."""

    def views(self, sequence: DraftSequence) -> Mapping[str, DraftSequence]:
        """The sequence as the sources that hold it know it, by their names."""
        ...


def memory_counts(drafters: Iterable[Drafter]) -> MemoryCounts:
    """Sum of the counts of drafters that have `memory_counts`, as those with a memory of earlier texts do."""
    kept = [drafter.memory_counts for drafter in drafters if hasattr(drafter, "memory_counts")]
    return MemoryCounts(*map(sum, zip(MemoryCounts(), *kept, strict=True)))


def source_names(drafter: Drafter) -> Sequence[str]:
    """Names of the drafters that may work for this one; empty unless it is a `ComposedDrafter`."""
    return tuple(getattr(drafter, "sources", ()))


def views_of(drafter: Drafter, name: str, sequence: DraftSequence) -> Mapping[str, DraftSequence]:
    """The sequence as the drafters that hold it know it, by name. `name`: name of `drafter`."""
    if hasattr(drafter, "views"):
        return cast(ComposedDrafter, drafter).views(sequence)
    return {name: sequence}
