"""The policy that switches overlapped rounds on and off by measured times."""

import random

import pytest

from betoken.common.economy.overlap import MAX_PAUSE_ROUNDS, NUM_TRIAL_ROUNDS, OverlapPolicy


def run(policy: OverlapPolicy, num_rounds: int, **costs: float) -> float:
    """Rounds of five draft tokens on a machine with these costs, s; the share of overlapped ones."""
    rng, num_on = random.Random(1), 0
    was_on = False
    for _ in range(num_rounds):
        is_on = policy.is_on
        is_hit = rng.random() < costs["hit_rate"] if was_on else None
        verify_s = costs["verify"] * (costs.get("slowdown", 1.0) if is_on else 1.0)
        policy.record(5, 0.0 if is_hit else costs["draft"], verify_s, is_hit, is_on)
        num_on += is_on
        was_on = is_on
    return num_on / num_rounds


def test_overlap_is_switched_on_if_the_drafter_has_its_own_device() -> None:
    policy = OverlapPolicy()
    assert run(policy, 200, verify=0.02, draft=0.01, hit_rate=0.7) > 0.8
    assert policy.is_on and policy.gain == pytest.approx(1.5 / (0.7 + 0.3 * 1.5), rel=0.15)


@pytest.mark.parametrize(
    "costs",
    [
        {"draft": 0.01, "hit_rate": 0.7, "slowdown": 1.5},  # shared cores
        {"draft": 0.01, "hit_rate": 0.0},
        {"draft": 0.04, "hit_rate": 0.5, "slowdown": 1.6},  # drafting takes longer than the target
    ],
)
def test_overlap_is_switched_off_after_a_trial_if_it_does_not_pay_off(costs: dict[str, float]) -> None:
    policy = OverlapPolicy()
    assert run(policy, 1000, verify=0.02, **costs) < 0.08
    assert not policy.is_on


def test_overlap_is_not_tried_with_a_drafter_that_answers_at_once() -> None:
    assert run(OverlapPolicy(), 3000, verify=0.02, draft=0.0001, hit_rate=0.9) == 0


def test_overlap_stays_off_if_the_drafter_cannot_draft_ahead() -> None:
    policy = OverlapPolicy()
    for _ in range(1000):
        policy.record(5, 0.01, 0.02, None, policy.is_on)
    assert not policy.is_on


def test_overlap_follows_a_machine_that_changes() -> None:
    policy = OverlapPolicy()
    good = {"verify": 0.02, "draft": 0.01, "hit_rate": 0.7}
    run(policy, 200, **good)
    run(policy, 2 * MAX_PAUSE_ROUNDS, **good, slowdown=1.6)
    assert not policy.is_on
    run(policy, 3 * MAX_PAUSE_ROUNDS, **good)
    assert policy.is_on


def test_overlap_does_not_alternate_at_the_break_even() -> None:
    policy, changes = OverlapPolicy(), 0
    for _ in range(400):
        was_on = policy.is_on
        run(policy, NUM_TRIAL_ROUNDS, verify=0.02, draft=0.01, hit_rate=0.5, slowdown=1.25)
        changes += policy.is_on != was_on
    assert changes < 40
