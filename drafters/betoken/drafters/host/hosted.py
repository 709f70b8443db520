"""Records of the drafter host: a hosted sequence, its requests and their answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from betoken.common.economy.terms import DraftTerms
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence, RequestKey, views_of
from betoken.rpc.link.worker_load import SequenceKey

if TYPE_CHECKING:
    from betoken.drafters.host.feed import CommittedRows

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Request:
    """Request for one draft."""

    num_tokens: int
    """Most draft tokens without terms."""
    max_tokens: int
    """Most draft tokens of the answer."""
    takes_trees: bool = False
    terms: DraftTerms | None = None
    num_outcomes: int = 0
    """See `DraftSequence.num_outcomes`."""
    requested_ns: int = 0
    """Arrival, `time.perf_counter_ns`."""
    ahead_ids: Sequence[int] = ()
    """Hypothetical ids between the committed text and the draft; empty = the draft continues the committed text."""
    key: RequestKey = (0, 0)
    """Set by the host."""
    started_ns: int = 0
    """When the drafter received it, `time.perf_counter_ns`; 0 while it is queued."""
    branch: DraftSequence | None = None
    """Copy of the sequence with `ahead_ids`, open in the drafter until the draft is complete."""

    def check(self, drafted: Drafted, vocab_size: int) -> None:
        """Raises:
        ValueError: the draft is longer than requested, a tree instead of a chain, or has ids outside the vocabulary.
        """
        if len(drafted.draft_ids) > self.max_tokens:
            raise ValueError(f"{len(drafted.draft_ids)} draft ids where {self.max_tokens} were requested")
        if max(drafted.draft_ids, default=0) >= vocab_size:
            raise ValueError(f"draft ids {drafted.draft_ids}: not all are below {vocab_size}")
        if drafted.parents is not None and not self.takes_trees:
            raise ValueError("a tree instead of a chain")


@dataclass(slots=True, eq=False)
class HostedSequence:
    """An open sequence, its drafter and its unanswered requests."""

    sequence: DraftSequence
    name: str
    """Name of its drafter."""
    drafter: Drafter
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    """Unanswered requests by key, in the order of arrival."""
    at_work: Request | None = None
    """Request for the committed text that the drafter works on; ids decided meanwhile are late."""
    late_ids: list[int] = field(default_factory=list)
    """Ids decided since `at_work` was started; committed when it ends."""
    late_rows: list[CommittedRows] = field(default_factory=list)
    """Features received since then."""
    num_faults: int = 0
    """Consecutive failed drafts."""
    num_unread: int = 0
    """Consecutive failures to read features."""
    is_held: bool = True
    """Whether the drafter holds the sequence."""

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key

    @property
    def deadline_s(self) -> float | None:
        return self.sequence.deadline_s

    @property
    def span(self) -> Span:
        return self.sequence.span

    @property
    def pending_since_ns(self) -> int | None:
        """Arrival of the oldest unanswered request, `time.perf_counter_ns`; None without one."""
        return next((request.requested_ns for request in self.requests.values()), None)

    @property
    def tip(self) -> RequestKey:
        """Committed length and last committed id, late ids included."""
        return len(self.sequence.ids) + len(self.late_ids), (self.late_ids or self.sequence.ids)[-1]

    @property
    def views(self) -> Mapping[str, DraftSequence]:
        """The sequence as the drafters that hold it know it, by name."""
        return views_of(self.drafter, self.name, self.sequence)

    def reopen(self) -> bool:
        """Open the sequence again, without a request; return whether the drafter holds it."""
        self.at_work, self.sequence.is_waiting = None, False
        try:
            self.drafter.open(self.sequence)
        except Exception:
            logger.exception("drafter %s cannot reopen a sequence", self.name)
            return False
        self.is_held = True
        return True

    def release(self) -> None:
        """Close the sequence and its branches in the drafter; idempotent."""
        for request in self.requests.values():
            self.close_branch(request)
        if self.is_held:
            self._close(self.sequence)
        self.is_held = False

    def close_branch(self, request: Request) -> None:
        """Close the branch of a request, if the drafter holds one."""
        if request.branch is not None and self.is_held:
            self._close(request.branch)

    def fail_requests(self) -> list[Answer]:
        """End all requests; return their answers, empty drafts."""
        requests, self.requests = self.requests, {}
        for request in requests.values():
            self.close_branch(request)
        empty = Drafted(self.sequence, [])
        return [Answer(self, request, empty, (self.name,), 0, is_failed=True) for request in requests.values()]

    def end_work(self) -> list[int]:
        """End the work for the committed text; return the ids decided since it began."""
        self.at_work, self.sequence.is_waiting = None, False
        ids, self.late_ids = self.late_ids, []
        return ids

    def _close(self, sequence: DraftSequence) -> None:
        try:
            self.drafter.close(sequence)
        except Exception:
            logger.exception("drafter %s failed", self.name)


@dataclass(slots=True)
class Answer:
    """A finished request."""

    hosted: HostedSequence
    request: Request
    drafted: Drafted
    sources: Sequence[str]
    """Names of the drafters that proposed the tokens: one for all, or one per id."""
    forward_ns: int
    """Drafting, for all sequences of the batch."""
    is_failed: bool = False
    """Whether the drafter failed; the draft is empty."""
    is_ahead: bool = False
    """Whether it was drafted ahead and answers no request yet; `request` has its key alone."""

    @property
    def key(self) -> SequenceKey:
        return self.hosted.key

    @property
    def queue_ns(self) -> int:
        """From the request's arrival to the start of drafting."""
        return max(0, self.request.started_ns - self.request.requested_ns)
