"""Commands to a draft core, as values; see `betoken.rpc.link.commands`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.trace import INVALID_SPAN, Span

from betoken.common.economy.terms import DraftTerms
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
    span: Span = field(default=INVALID_SPAN, compare=False, repr=False)
    """Ends when the sequence does."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Append ids that the target decided; unknown sequences are ignored."""

    key: SequenceKey
    base_length: int
    """Committed length before them."""
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """Ask a sequence's drafter for a block."""

    key: SequenceKey
    num_tokens: int
    """Maximum number of draft tokens without terms."""
    arrived_ns: int
    """Arrival, `time.perf_counter_ns`."""
    takes_trees: bool = False
    terms: DraftTerms | None = None


DraftCommand: TypeAlias = Open | Commit | RequestDraft | TableCommand
