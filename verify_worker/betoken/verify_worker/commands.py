"""Commands to a verify core, as values; see `betoken.rpc.link.commands`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.trace import INVALID_SPAN, Span

from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.sampler.verification import PAPERS_BOUNDS, TypicalBounds, VerificationMode
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.link.commands import TableCommand
from betoken.rpc.link.worker_load import SequenceKey


class Rounds(NamedTuple):
    """How a grant is gone through: with drafts of the sequence's attached drafter, or without."""

    num_draft_tokens: int = 0
    """Most of a round; 0 = plain steps."""
    is_priced: bool = False
    """Whether the drafter may choose the draft length, if it reports confidences."""


PLAIN = Rounds()


@dataclass(frozen=True, slots=True)
class Open:
    """Take a sequence in; its prefill starts with the next forward."""

    key: SequenceKey
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Committed output."""
    max_length: int
    """Largest prompt + output, tokens."""
    opened_ns: int
    """Arrival, `time.perf_counter_ns`."""
    mode: VerificationMode = VerificationMode.COUPLED
    bounds: TypicalBounds = PAPERS_BOUNDS
    """How likely a draft token has to be in the mode TYPICAL."""
    grammar: GrammarRule | None = None
    """Grammar of a constraint, behind `output_ids`; the core moves a copy of it."""
    drafter: str = ""
    """Name of its attached drafter; empty = none."""
    drafter_settings: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    """Deadline, seconds of `time.monotonic`; None = none."""
    predicted_ids: Sequence[int] = ()
    """Ids that the output is expected to be, for its drafter; empty = none."""
    tenant: bytes = b""
    """Opaque id of its tenant; empty = not known."""
    num_prompt_logprobs: int | None = None
    """Most likely ids reported per prompt token, 0 to 20; None = no logprobs of the prompt."""
    num_sent: int = 0
    """Leading prompt logprobs that are not sent again."""
    span: Span = field(default=INVALID_SPAN, compare=False, repr=False)
    """Ends when the sequence does."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Queue a draft block for the next forward."""

    key: SequenceKey
    base_length: int
    """Committed length that the block extends."""
    draft_ids: Sequence[int]
    """At least one."""
    arrived_ns: int
    """Arrival, `time.perf_counter_ns`."""
    parents: Sequence[int] = ()
    """Tree: index of each draft id's parent, -1 = the last committed token; empty = a chain."""
    draft_probs: Sequence[SparseProbs] = ()
    """Distribution that each draft id was sampled from; empty = each was certain."""
    num_plain_steps: int = 0
    """Tokens that may be decoded alone after the block."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Let the worker decode a sequence alone. A repeated or late grant changes nothing."""

    key: SequenceKey
    base_length: int
    """Committed length from which the grant counts."""
    num_tokens: int
    """At least 1."""
    arrived_ns: int
    """Arrival, `time.perf_counter_ns`."""
    rounds: Rounds = PLAIN
    drafter: str = ""
    """Name of the attached drafter of the rounds; empty = the sequence's present one."""


VerifyCommand = Open | Verify | Grant | TableCommand
