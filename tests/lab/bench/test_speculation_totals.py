"""Totals are ratios of sums: a short answer weighs less than a long one, and rounds are counted as they were."""

from dataclasses import replace

import pytest

from betoken.bench.speculation_totals import (
    acceptance_rate,
    block_efficiency,
    draft_forwards_per_round,
    drafting_ms,
    first_drafting_ms,
    round_times,
)
from betoken.client import SpeculationStats
from betoken.v1 import generation_pb2 as pb

NONE = SpeculationStats.from_proto(pb.SpeculationStats())
SHORT = replace(
    NONE,
    num_drafts=1,
    num_draft_tokens=4,
    num_accepted_tokens=4,
    num_verify_forwards=1,
    num_emitted_tokens=5,
    num_rounds=1,
    draft_forward_s=0.020,
    first_draft_forward_s=0.020,
    round_s=0.030,
)
LONG = replace(
    NONE,
    num_drafts=3,
    num_draft_tokens=6,
    num_accepted_tokens=1,
    num_verify_forwards=5,
    num_emitted_tokens=6,
    num_rounds=5,
    num_draft_forwards=9,
    draft_forward_s=0.018,
    first_draft_forward_s=0.010,
    draft_queue_s=0.005,
    verify_forward_s=0.010,
    verify_queue_s=0.005,
    round_s=0.060,
)


def test_totals_are_ratios_of_sums() -> None:
    assert block_efficiency([SHORT, LONG]) == pytest.approx(11 / 6, abs=1e-3)
    assert acceptance_rate([SHORT, LONG]) == 0.5
    assert draft_forwards_per_round([SHORT, LONG]) == 1.5


def test_a_round_is_timed_whether_its_draft_was_empty_or_not() -> None:
    times = round_times([LONG])
    assert times == {"whole": 12, "draft_queue": 1, "draft_forward": 3.6, "verify_queue": 1, "verify_forward": 2}


def test_drafting_leaves_out_the_first_round_and_the_queue() -> None:
    assert drafting_ms([SHORT, LONG]) == 2.0
    assert first_drafting_ms([SHORT, LONG, NONE]) == 15.0


def test_without_speculation_there_is_nothing_to_divide() -> None:
    assert (block_efficiency([NONE]), acceptance_rate([])) == (0, 0)
    assert draft_forwards_per_round([NONE]) == 0
    assert drafting_ms([SHORT]) is None and first_drafting_ms([NONE]) is None
