"""Counters of one request, and the message that reports them."""

from __future__ import annotations

from betoken.router.responses import finish_of
from betoken.router.round.events import Finished
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.answer import FinishReason
from betoken.v1 import generation_pb2 as pb


def test_the_finish_message_reports_the_counters_as_they_were_accumulated() -> None:
    counts = SpeculationCounts(pb.SpeculationStats(num_failovers=3, policy=pb.SpeculationPolicy(reason="on")))
    counts.add_round(1000, draft_queue_ns=1, draft_forward_ns=2, verify_ns=1, num_draft_forwards=4)
    counts.add_draft(num_draft_tokens=6, depth=2, num_accepted=1)
    for num_tokens, num_used in ((9, 3), (6, 0), (0, None)):
        counts.add_ahead(num_tokens, num_used)
    counts.end({"timeout": 50, "lost": 51})
    finish = finish_of(Finished(FinishReason.LENGTH, "", 1, 2, 4, counts, 5, 6, 7))
    assert finish.speculation == pb.SpeculationStats(
        **{"num_rounds": 1, "round_ns": 1000, "draft_queue_ns": 1, "draft_forward_ns": 2, "first_draft_forward_ns": 2},
        **{"num_draft_forwards": 4, "router_overhead_p50_ns": 996, "num_failovers": 3, "num_failed_drafts": 101},
        **{"num_drafts": 1, "num_draft_tokens": 6, "num_accepted_tokens": 1},
        **{"num_ahead_hits": 1, "num_ahead_misses": 1, "num_ahead_tokens": 15, "num_used_ahead_tokens": 3},
        num_drafted_per_position=[1, 1],
        num_accepted_per_position=[1, 0],
        draft_outcomes=[pb.DraftOutcomes(length=2, num_drafts_by_accepted=[0, 1, 0])],
        num_failed_drafts_by_reason={"timeout": 50, "lost": 51},
        policy=pb.SpeculationPolicy(reason="on"),
    )
    assert finish.usage == pb.Usage(prompt_tokens=1, output_tokens=2, cached_prompt_tokens=4)
    assert (finish.queue_ns, finish.time_to_first_token_ns, finish.duration_ns) == (5, 6, 7)


def test_draft_outcomes_count_drafts_by_length_and_accepted_tokens() -> None:
    counts = SpeculationCounts()
    for length, num_accepted in ((3, 0), (1, 1), (3, 3), (3, 0)):
        counts.add_draft(length, length, num_accepted)
    assert [(one.length, list(one.num_drafts_by_accepted)) for one in counts.stats.draft_outcomes] == [
        (3, [2, 0, 0, 1]),
        (1, [0, 1]),
    ]


def test_times_that_a_worker_invents_stop_at_the_range_of_their_statistics() -> None:
    counts = SpeculationCounts()
    for _ in range(2):
        counts.add_forward(1, queue_ns=2**64 - 1, forward_ns=2**64 - 2)
        counts.add_round(1, draft_queue_ns=2**64 - 1, draft_forward_ns=2**64 - 2, verify_ns=2**64 - 1)
    stats = counts.stats
    sums = (stats.verify_queue_ns, stats.verify_forward_ns, stats.draft_queue_ns, stats.draft_forward_ns)
    assert sums == (2**64 - 1,) * 4
