"""A verify worker's state of one sequence: committed ids, KV, and the work waiting. Ids only, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from betoken.common.tree import longest_path
from betoken.engine.page_table import Found
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampler import TokenLogprob
from betoken.engine.sampler.verification import VerificationMode
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.link.worker_load import SequenceKey
from betoken.verify_worker.commands import PLAIN, Open, Rounds


@dataclass(slots=True)
class Block:
    """A draft block waiting for its forward."""

    draft_ids: Sequence[int]
    parents: Sequence[int] = ()
    """Tree: index of each draft id's parent, -1 = the last committed token; empty = a chain."""
    draft_probs: Sequence[SparseProbs] = ()
    """Distribution of each draft id; empty = each was certain."""
    num_sent: int = field(init=False)
    """Draft ids as they came."""
    nodes: Sequence[int] | None = None
    """Indices of the remaining draft ids among the received ones; None = all remain."""

    def __post_init__(self) -> None:
        self.num_sent = len(self.draft_ids)

    def keep(self, nodes: Sequence[int]) -> None:
        """Leave out all drafts but `nodes` (ascending), each of which follows one of them or none."""
        if len(nodes) < len(self.draft_ids):
            places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
            self.draft_ids = [self.draft_ids[node] for node in nodes]
            self.parents = [places[self.parents[node]] for node in nodes] if self.parents else []
            self.nodes = nodes

    def as_sent(self, path: Sequence[int]) -> list[int]:
        """Nodes of what is left, by their places among all that came."""
        return list(path) if self.nodes is None else [self.nodes[node] for node in path]

    @property
    def depth(self) -> int:
        """The most draft tokens that can be accepted."""
        return longest_path(self.parents) if self.parents else len(self.draft_ids)


@dataclass(slots=True)
class AttachedRound:
    """The work of a sequence's attached drafter for its next decision; the draft, unless empty, is its block."""

    sources: Sequence[str] = ()
    """Names of the drafters that proposed the tokens: one for all, or one per id."""
    forward_ns: int = 0
    """Drafting, for all sequences of the batch."""
    num_forwards: int = 0
    is_failed: bool = False


@dataclass(slots=True, eq=False)
class VerifySequence:
    """One open sequence. Committed length = len(ids); KV covers [0, kv_length), at most len(ids) - 1 positions."""

    opened: Open
    order: int
    """Place in the order of opening; preemption takes the youngest."""
    key: SequenceKey = field(init=False)
    params: SamplingParams = field(init=False)
    prompt_ids: Sequence[int] = field(init=False)
    output_ids: list[int] = field(init=False)
    max_length: int = field(init=False)
    """Largest prompt + output, tokens."""
    mode: VerificationMode = field(init=False)
    drafter: str = field(init=False)
    """Name of its attached drafter; empty = none."""
    deadline_s: float | None = field(init=False)
    """Deadline, seconds of `time.monotonic`; None = none."""
    span: Span = field(init=False)
    """Ends when the sequence does."""
    terminal_ids: frozenset[int] = field(init=False)
    """Ids after which the worker does not decode alone."""
    is_finished: bool = field(init=False)
    """Whether the committed ids end the answer by EOS, stop ids or length; stop strings are handled by the router."""
    ids: list[int] = field(init=False)
    """Prompt + committed output."""
    rules: SequenceRules = field(init=False)
    takes_pages: bool = True
    """Whether it may begin on pages that others computed; no, where its drafter reads the rows of all its text."""
    next_to_send: int = field(init=False)
    """Position of the prompt token whose logprobs are sent next; `len(prompt_ids)` = none pending."""
    page_ids: list[int] = field(default_factory=list)
    found: Found = field(default_factory=Found)
    """While it waits for pages: what others have computed of it."""
    kv_length: int = 0
    is_preempted: bool = False
    is_in_flight: bool = False
    """Whether a forward under way has its tokens."""
    is_closed: bool = False
    block: Block | None = None
    plain_until: int = 0
    """Committed length up to which the worker may decode alone."""
    rounds: Rounds = PLAIN
    """How the grant is gone through."""
    attached_round: AttachedRound | None = None
    """The round under way; None: its drafter was not asked, or has not answered."""
    awaits_draft: bool = False
    """Whether the round waits for its drafter, as its tokens would be others without the draft."""
    queued_ns: int = field(init=False)
    """Place in the queue, `time.perf_counter_ns`: arrival of the next work, the open for a prompt; for
    a further step of a grant, the last decision."""
    idle_since_ns: int = field(init=False)
    """Time at which there was last something to compute, `time.perf_counter_ns`."""
    asked_ns: int = 0
    """When the last block, or the grant in use, arrived: `time.perf_counter_ns`."""
    num_draft_tokens: int = 0
    num_accepted: int = 0
    """Draft tokens accepted into the answer."""
    num_cached_tokens: int = 0
    """Leading ids whose KV was found in the cache, until a decision reports it."""

    def __post_init__(self) -> None:
        opened = self.opened
        self.key, self.params, self.mode = opened.key, opened.params, opened.mode
        self.prompt_ids, self.output_ids = opened.prompt_ids, list(opened.output_ids)
        self.max_length, self.deadline_s = opened.max_length, opened.deadline_s
        self.drafter, self.span = opened.drafter, opened.span
        grammar = opened.grammar.copy() if opened.grammar is not None else None
        self.next_to_send = len(self.prompt_ids) if opened.num_prompt_logprobs is None else 1 + opened.num_sent
        self.ids = [*self.prompt_ids, *self.output_ids]
        self.rules = SequenceRules(self.params, self.prompt_ids, self.output_ids, grammar)
        eos_ids = () if self.params.ignore_eos else self.params.eos_token_ids
        self.terminal_ids = frozenset((*eos_ids, *self.params.stop_token_ids))
        self.is_finished = self._num_to_end(self.output_ids) is not None or len(self.ids) >= self.max_length
        self.queued_ns = self.idle_since_ns = opened.opened_ns

    @property
    def committed_length(self) -> int:
        return len(self.ids)

    @property
    def num_missing_kv(self) -> int:
        """Positions [kv_length, committed_length - 1) still to be computed before a block can run."""
        return len(self.ids) - 1 - self.kv_length

    @property
    def has_pending_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are still to be sent."""
        return self.next_to_send < len(self.prompt_ids)

    @property
    def first_logprob_row(self) -> int:
        """Position of the first row whose logits are needed: it scores the next token."""
        return self.next_to_send - 1 if self.has_pending_prompt_logprobs else len(self.ids) - 1

    @property
    def num_findable(self) -> int:
        """Leading ids whose KV it may take from others: a row that was found has no logits."""
        return self.first_logprob_row if self.takes_pages else 0

    @property
    def has_block(self) -> bool:
        """Whether a draft block or a plain step waits."""
        return self.block is not None or self.plain_until > len(self.ids)

    @property
    def pending_since_ns(self) -> int | None:
        """Since when its router waits for logprobs or a result, `time.perf_counter_ns`; None while it does not."""
        return self.queued_ns if self.has_block or self.has_pending_prompt_logprobs else None

    @property
    def wants_draft(self) -> bool:
        """Whether the next round is to have a draft of its attached drafter that was not proposed yet."""
        is_granted = self.rounds.num_draft_tokens > 0 and self.plain_until > len(self.ids)
        return is_granted and self.block is None and self.attached_round is None and not self.is_in_flight

    @property
    def wants_forward(self) -> bool:
        """Whether the next forward has something to compute; a preempted sequence starts over only when its router
        waits for it."""
        if self.is_in_flight:
            return False
        return self.has_block or self.has_pending_prompt_logprobs or (self.num_missing_kv > 0 and not self.is_preempted)

    @property
    def is_between_blocks(self) -> bool:
        """Whether nothing is missing but its next block."""
        return bool(self.page_ids) and not self.has_block and self.num_missing_kv == 0

    def ask(self, arrived_ns: int) -> None:
        """Arrival of a draft, or of a grant if nothing waits (`time.perf_counter_ns`)."""
        self.asked_ns = arrived_ns
        if not self.wants_forward:  # otherwise its prompt waits, whose place is before all later work
            self.queued_ns = arrived_ns

    def is_idle_since(self, time_ns: int) -> bool:
        """Whether it has had nothing to compute since then (`time.perf_counter_ns`)."""
        return not self.wants_forward and not self.is_in_flight and self.idle_since_ns <= time_ns

    def commit(self, emitted_ids: list[int]) -> int:
        """Append decided tokens; return how many belong to the answer, up to an id that ends it.

        The forward that decided them wrote the KV of each except the last.
        """
        self.ids.extend(emitted_ids)
        self.output_ids.extend(emitted_ids)
        self.rules.commit(emitted_ids)
        num_kept = self._num_to_end(emitted_ids)
        self.is_finished = num_kept is not None or len(self.ids) >= self.max_length
        self.kv_length = len(self.ids) - 1
        return len(emitted_ids) if num_kept is None else num_kept

    def _num_to_end(self, ids: list[int]) -> int | None:
        """How many of these, the last of the output, reach to the first terminal id after min_new_tokens; None without
        one."""
        start = max(0, self.params.min_new_tokens - (len(self.output_ids) - len(ids)))
        # A grammar that allows nothing else ends the answer before min_new_tokens too.
        early_ids = self.params.eos_token_ids if self.rules.has_grammar else ()
        for index, token_id in enumerate(ids):
            if token_id in early_ids or (index >= start and token_id in self.terminal_ids):
                return index + 1
        return None


@dataclass(slots=True)
class AttachedDecision:
    """The fate of an attached drafter's proposal, an empty one included."""

    accepted_ids: list[int]
    sources: Sequence[str]
    """Names of the drafters that proposed them: one for all, or one per id."""
    depth: int
    """The most draft tokens that could have been accepted."""
    is_exhausted: bool
    """Whether nothing was proposed after the accepted ids."""
    forward_ns: int
    num_forwards: int
    is_failed: bool
    num_predicted_tokens: int = 0
    """Draft tokens out of the sequence's prediction, accepted or not."""


@dataclass(slots=True)
class Decision:
    """The target's decision about one block or plain step of one sequence."""

    key: SequenceKey
    base_length: int
    num_draft_tokens: int
    num_accepted: int
    path: list[int] | None
    """The accepted nodes of a tree, root first; None for chains."""
    next_id: int
    logprobs: list[TokenLogprob]
    """One per emitted token when asked for, else empty."""
    queue_ns: int
    forward_ns: int
    num_cached_tokens: int
    num_kept: int
    """Tokens up to an id that ends the answer, at most num_accepted + 1."""
    attached: AttachedDecision | None = None
    """Round with the attached drafter, if any."""
