"""Commands to a draft core, as values; see `betoken.rpc.link.commands`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.trace import INVALID_SPAN, Span

from betoken.common.economy.terms import DraftTerms
from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.drafters.drafter import DraftSequence
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import HostedSequence, Request
from betoken.engine.sampling import SamplingParams
from betoken.rpc.link.commands import TableCommand
from betoken.rpc.link.worker_load import SequenceKey

if TYPE_CHECKING:
    from betoken.engine.rules.grammar import GrammarRule


@dataclass(frozen=True, slots=True)
class Open:
    """Take a sequence in for a drafter."""

    key: SequenceKey
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Committed output."""
    max_length: int
    """Largest prompt + output, tokens."""
    drafter: str = ""
    """Name of its drafter; empty = the default one."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the drafter."""
    wants_probs: bool = False
    """Whether each draft token should come with the distribution it was sampled from."""
    draft_affects_output: bool = False
    """Whether the target's tokens depend on the draft."""
    deadline_s: float | None = None
    """Deadline, seconds of `time.monotonic`; None = none."""
    grammar: GrammarRule | None = None
    """Grammar of a constraint, behind `output_ids`; the core moves a copy of it."""
    predicted_ids: Sequence[int] = ()
    """Ids that the output is expected to be, for its drafter; empty = none."""
    tenant: bytes = b""
    """Opaque id of its tenant; empty = not known."""
    span: Span = field(default=INVALID_SPAN, compare=False, repr=False)
    """Ends when the sequence does."""

    def to_sequence(self) -> DraftSequence:
        """The sequence as drafters see it, without its rules."""
        return DraftSequence(
            key=self.key,
            params=self.params,
            prompt_ids=self.prompt_ids,
            output_ids=list(self.output_ids),
            max_length=self.max_length,
            settings=dict(self.settings),
            deadline_s=self.deadline_s,
            wants_probs=self.wants_probs,
            draft_affects_output=self.draft_affects_output,
            predicted_ids=self.predicted_ids,
            tenant=self.tenant,
            span=self.span,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """Append ids that the target decided; unknown sequences are ignored."""

    key: SequenceKey
    base_length: int
    """Committed length before them."""
    ids: Sequence[int]

    def run(self, host: DrafterHost, entry: HostedSequence) -> None:
        """Commit the ids to their sequence.

        Raises:
            FailedPreconditionError: the base length is not the committed length.
            InvalidArgumentError: the ids exceed the largest length.
        """
        length, max_length = entry.tip[0], entry.sequence.max_length
        if self.base_length != length:
            raise FailedPreconditionError(
                f"commit.base_length = {self.base_length}: must be {length}, the committed length of this worker"
            )
        if length + len(self.ids) > max_length:
            limit = f"must end within max_length = {max_length}"
            raise InvalidArgumentError("commit.ids", f"{len(self.ids)} ids", limit)
        host.commit(entry, self.ids)


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """Request a draft from a sequence's drafter."""

    key: SequenceKey
    base_length: int
    """Committed length that the draft extends."""
    next_id: int
    """Last id of that length."""
    num_tokens: int
    """Maximum number of draft tokens without terms."""
    arrived_ns: int
    """Arrival, `time.perf_counter_ns`."""
    takes_trees: bool = False
    terms: DraftTerms | None = None
    num_outcomes: int = 0
    """Outcomes of the draft's verification to draft ahead for."""

    def run(self, host: DrafterHost, entry: HostedSequence) -> None:
        """Request the draft for its sequence.

        Raises:
            FailedPreconditionError: the committed text is another, or its request is still open.
        """
        if (self.base_length, self.next_id) != entry.tip:
            limit = f"must be {entry.tip[0]} and {entry.tip[1]}, the committed length and last id of this worker"
            raise FailedPreconditionError(
                f"request.base_length = {self.base_length} and request.next_id = {self.next_id}: {limit}"
            )
        terms = (
            None if entry.sequence.draft_affects_output else self.terms
        )  # a length that follows the clock chooses tokens
        max_tokens = self.num_tokens if terms is None else terms.max_tokens
        how = (self.takes_trees, terms, self.num_outcomes, self.arrived_ns)
        host.request(entry, Request(self.num_tokens, max_tokens, *how))


DraftCommand: TypeAlias = Open | Commit | RequestDraft | TableCommand
