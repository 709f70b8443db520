"""The plan: best draft lengths, costs of a mixture of experts, and rejected inputs."""

import math

import pytest

from betoken.common.economy.plan import DraftKind, PlanInputs, plan
from betoken.common.errors import InvalidArgumentError

DENSE = {"target_step_ms": 20.0, "draft_step_ms": 2.0, "acceptance": 0.8}


def test_a_plan_has_the_draft_length_of_the_highest_speedup():
    planned = plan(PlanInputs(**DENSE, hit_rate=1.0))
    speeds = [(1 - 0.8 ** (k + 1)) / 0.2 / (1 + 0.1 * k) for k in range(1, 17)]
    assert [one.synchronous.speedup for one in planned.rounds] == pytest.approx(speeds)
    assert planned.best_synchronous.num_draft_tokens == 1 + speeds.index(max(speeds)) == 6
    assert planned.best_overlapped.num_draft_tokens == 9  # ten forwards of the drafter take one decode step
    assert planned.tokens_per_s() == 50
    assert planned.tokens_per_s(planned.best_overlapped.overlapped) == pytest.approx(50 * (1 - 0.8**10) / 0.2)


def test_a_plan_with_a_round_trip_costs_both_hops_or_one():
    fast, slow = (plan(PlanInputs(**DENSE, rtt_ms=rtt, hit_rate=1.0)).rounds[3] for rtt in (0.0, 4.0))
    assert slow.synchronous.speedup == pytest.approx(3.3616 / (1.4 + 0.2 + 0.2))
    assert slow.overlapped.speedup == pytest.approx(3.3616 / (1.0 + 0.2))
    assert fast.synchronous.break_even_verify_ratio == pytest.approx(3.3616 - 0.4)
    assert slow.synchronous.break_even_verify_ratio == pytest.approx(3.3616 - 0.4 - 0.4)
    assert fast.synchronous.break_even_draft_ratio == pytest.approx((3.3616 - 1) / 4)


def test_a_plan_of_a_mixture_of_experts_has_its_verify_ratio():
    planned = plan(PlanInputs(**DENSE, experts=8, active=2, batch=2))
    assert planned.decode_experts == pytest.approx(8 * (1 - 0.75**2))
    one = planned.rounds[2]
    assert one.verify_experts == pytest.approx(8 * (1 - 0.75**8))
    assert one.verify_ratio == pytest.approx((1 - 0.75**8) / (1 - 0.75**2))
    assert one.synchronous.speedup == pytest.approx(one.block_length / (one.verify_ratio + 0.3))


def test_a_plan_adds_the_time_of_each_token_of_the_batch_to_the_verify_ratio():
    planned = plan(PlanInputs(**DENSE, batch=16, token_ms=0.25))
    assert planned.rounds[3].verify_ratio == pytest.approx(1 + 16 * 4 * 0.25 / 20)
    assert planned.tokens_per_s() == 16 * 50


def test_a_plan_of_a_parallel_drafter_costs_one_forward():
    planned = plan(PlanInputs(**DENSE, draft=DraftKind.PARALLEL))
    assert planned.rounds[7].synchronous.speedup == pytest.approx((1 - 0.8**9) / 0.2 / 1.1)
    assert planned.best_synchronous.num_draft_tokens == 16


@pytest.mark.parametrize(
    "field, value, limit",
    [
        ("target_step_ms", 0.0, "must be 1e-06 to 1000000000"),
        ("draft_step_ms", -1.0, "must be 0 to 1000000000"),
        ("acceptance", 1.01, "must be 0 to 1"),
        ("acceptance", math.nan, "must be 0 to 1"),
        ("hit_rate", -0.1, "must be 0 to 1"),
        ("rtt_ms", math.inf, "must be 0 to 1000000000"),
        ("token_ms", -1.0, "must be 0 to 1000000000"),
        ("batch", 0, "must be 1 to 1048576"),
        ("max_draft_tokens", 513, "must be 1 to 512"),
        ("experts", 8, "must be given together"),
    ],
)
def test_a_plan_rejects_an_input_outside_its_range(field, value, limit):
    with pytest.raises(InvalidArgumentError, match=limit) as raised:
        PlanInputs(**DENSE | {field: value})
    assert raised.value.field == ("active" if field == "experts" else field)


def test_a_plan_rejects_more_active_experts_than_there_are():
    with pytest.raises(InvalidArgumentError, match=r"active = 9: must be 1 to 8"):
        PlanInputs(**DENSE, experts=8, active=9)
