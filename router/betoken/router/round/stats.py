"""Raw counters of one request's speculation, and its workers; readers compute the rates.

Knows lengths, durations and names only.
"""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from dataclasses import dataclass, field

from betoken.v1.generation_pb2 import SpeculationPolicy


@dataclass(slots=True)
class SpeculationCounts:
    """The effect of speculation on one request. Durations are sums over rounds, nanoseconds."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_drafted_per_position: list[int] = field(default_factory=list)
    num_verify_forwards: int = 0
    num_emitted_tokens: int = 0
    draft_forward_ns: int = 0
    draft_queue_ns: int = 0
    verify_forward_ns: int = 0
    verify_queue_ns: int = 0
    round_ns: int = 0
    num_failed_drafts_by_reason: Counter[str] = field(default_factory=Counter)
    """Drafts that were late, invalid or failed, by reason."""
    policy: SpeculationPolicy | None = None
    """State of the speculation policy for the request at its end; None without a drafter, or before the end."""
    num_failovers: int = 0
    num_rounds: int = 0
    first_draft_forward_ns: int = 0
    num_draft_forwards: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    queue_ns: int | None = None
    """From the wish to be admitted to admission; None before that."""
    first_token_ns: int = 0
    """`time.perf_counter_ns()` of the first token; 0 before."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the verify worker had before the first token; 0 until that came."""
    verify_workers: list[str] = field(default_factory=list)
    """Ids of the workers that had it open, in their order, each once."""
    draft_workers: list[str] = field(default_factory=list)
    """Draft tokens taken from the prediction that were rejected."""
    _overheads_ns: array[int] = field(default_factory=lambda: array("q"))

    @property
    def num_failed_drafts(self) -> int:
        """Drafts that were late, invalid or failed."""
        return self.num_failed_drafts_by_reason.total()

    @property
    def router_overhead_p50_ns(self) -> int:
        """Median over drafted rounds of the time neither worker accounts for; 0 without such rounds."""
        return round(statistics.median(self._overheads_ns)) if self._overheads_ns else 0

    def add_forward(self, num_emitted: int, queue_ns: int, forward_ns: int) -> None:
        """A verify forward, and how many of its tokens are the answer's."""
        self.num_verify_forwards += 1
        self.num_emitted_tokens += num_emitted
        self.verify_queue_ns += queue_ns
        self.verify_forward_ns += forward_ns

    def add_draft(self, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """A verified draft block of at least one token, and how many of its tokens are in the answer.

        `depth` < `num_draft_tokens` for a tree with branches.
        """
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = depth - len(self.num_drafted_per_position)
        if missing > 0:
            self.num_drafted_per_position += [0] * missing
            self.num_accepted_per_position += [0] * missing
        for position in range(depth):
            self.num_drafted_per_position[position] += 1
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1

    def add_predicted(self, num_tokens: int, num_accepted: int) -> None:
        """Draft tokens of a verified block that the request expects, and how many of them are in the answer."""
        self.num_accepted_prediction_tokens += num_accepted
        self.num_rejected_prediction_tokens += num_tokens - num_accepted

    def add_round(self, round_ns: int, draft_queue_ns: int, draft_forward_ns: int, verify_ns: int) -> None:
        """A round that asked for a draft and got one: from asking to the verdict."""
        if not self.num_rounds:
            self.first_draft_forward_ns = draft_forward_ns
        self.num_rounds += 1
        self.round_ns += round_ns
        self.draft_queue_ns += draft_queue_ns
        self.draft_forward_ns += draft_forward_ns
        self._overheads_ns.append(max(0, round_ns - draft_queue_ns - draft_forward_ns - verify_ns))
