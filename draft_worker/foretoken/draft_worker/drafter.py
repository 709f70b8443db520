"""The `Drafter` protocol: one way of guessing, for any number of sequences. Knows no links and no target."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.trace import INVALID_SPAN, Span

from foretoken.engine.sampling import SamplingParams
from foretoken.rpc.link.worker_entries import SequenceKey


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One open sequence as every drafter sees it; `state` belongs to its drafter."""

    key: SequenceKey
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    max_length: int
    """Largest prompt + output, tokens."""
    settings: dict[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    """On the `time.monotonic` clock."""
    span: Span = INVALID_SPAN
    """Ends when the sequence does."""
    ids: list[int] = field(init=False)
    """Prompt + committed output."""
    state: Any = None

    def __post_init__(self) -> None:
        self.ids = self.prompt_ids + self.output_ids


@dataclass(slots=True)
class Drafted:
    """A draft block: `draft_ids` [K] continue the committed ids the drafter was asked after; K may be 0."""

    sequence: DraftSequence
    draft_ids: list[int]


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
        """Queue a draft of at most `num_tokens` after all committed ids."""
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
