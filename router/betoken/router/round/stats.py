"""Counters of one request, accumulated in the message that reports them to the client.

Knows lengths, durations and names only; readers compute the rates.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from betoken.v1.generation_pb2 import DraftOutcomes, SpeculationStats

_MAX_NS = (1 << 64) - 1
"""Range of the sums; times invented by a worker may exceed it."""


@dataclass(slots=True)
class SpeculationCounts:
    """The effect of speculation on one request, and its workers."""

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    """Counters as the client receives them."""
    queue_ns: int | None = None
    """From the wish to be admitted to admission; None before that."""
    first_token_ns: int = 0
    """`time.perf_counter_ns()` of the first token; 0 before."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the verify worker had before the first token; 0 until that came."""
    verify_workers: list[str] = field(default_factory=list)
    """Ids of the workers that had it open, in their order, each once."""
    drafter: str = ""
    """Drafter used last; empty before the end, and without one."""
    draft_workers: list[str] = field(default_factory=list)
    """Ids of the draft workers that had it open, in their order, each once."""
    _outcomes: dict[int, DraftOutcomes] = field(default_factory=dict)
    """Entries of `stats.draft_outcomes` by draft length."""
    _overheads_ns: array[int] = field(default_factory=lambda: array("q"))
    """For each drafted round the time that neither worker accounts for."""

    def add_forward(self, num_emitted: int, queue_ns: int, forward_ns: int) -> None:
        """Count a verify forward, and how many of its tokens are part of the answer."""
        stats = self.stats
        stats.num_verify_forwards += 1
        stats.num_emitted_tokens += num_emitted
        stats.verify_queue_ns = min(_MAX_NS, stats.verify_queue_ns + queue_ns)
        stats.verify_forward_ns = min(_MAX_NS, stats.verify_forward_ns + forward_ns)

    def add_draft(self, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """Count a verified draft of at least one token, and how many of its tokens are part of the answer.

        `depth` < `num_draft_tokens` for a tree with branches.
        """
        stats = self.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_draft_tokens
        stats.num_accepted_tokens += num_accepted
        drafted, accepted = stats.num_drafted_per_position, stats.num_accepted_per_position
        missing = depth - len(drafted)
        if missing > 0:
            drafted.extend([0] * missing)
            accepted.extend([0] * missing)
        for position in range(depth):
            drafted[position] += 1
        for position in range(num_accepted):
            accepted[position] += 1
        outcomes = self._outcomes.get(depth)
        if outcomes is None:
            outcomes = self._outcomes[depth] = stats.draft_outcomes.add(length=depth)
            outcomes.num_drafts_by_accepted.extend([0] * (depth + 1))
        outcomes.num_drafts_by_accepted[num_accepted] += 1

    def add_predicted(self, num_tokens: int, num_accepted: int) -> None:
        """Count the draft tokens taken from the prediction, and how many of them are part of the answer."""
        self.stats.num_accepted_prediction_tokens += num_accepted
        self.stats.num_rejected_prediction_tokens += max(0, num_tokens - num_accepted)

    def add_round(
        self, round_ns: int, draft_queue_ns: int, draft_forward_ns: int, verify_ns: int, num_draft_forwards: int = 0
    ) -> None:
        """Count a round with a response to its draft request, from the request to the verification result."""
        stats = self.stats
        if not stats.num_rounds:
            stats.first_draft_forward_ns = draft_forward_ns
        stats.num_rounds += 1
        stats.num_draft_forwards += num_draft_forwards
        stats.round_ns += round_ns
        stats.draft_queue_ns = min(_MAX_NS, stats.draft_queue_ns + draft_queue_ns)
        stats.draft_forward_ns = min(_MAX_NS, stats.draft_forward_ns + draft_forward_ns)
        self._overheads_ns.append(max(0, round_ns - draft_queue_ns - draft_forward_ns - verify_ns))

    def add_ahead(self, num_tokens: int, num_used: int | None) -> None:
        """Count the tokens drafted ahead for a draft, and how many are part of it; None if none were to be drafted."""
        if num_used is not None:
            self.stats.num_ahead_hits += num_used > 0
            self.stats.num_ahead_misses += num_used == 0
            self.stats.num_ahead_tokens += num_tokens
            self.stats.num_used_ahead_tokens += num_used

    def end(self, failed_drafts: Mapping[str, int]) -> None:
        """Set the statistics that are known at the end; `failed_drafts`: number of failed drafts by reason."""
        stats = self.stats
        stats.num_failed_drafts_by_reason.update(failed_drafts)
        stats.num_failed_drafts = sum(failed_drafts.values())
        if self._overheads_ns:
            stats.router_overhead_p50_ns = round(statistics.median(self._overheads_ns))
