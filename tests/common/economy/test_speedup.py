"""The formulas of speculative decoding against values by hand, enumeration and simulation."""

import itertools
import random
from dataclasses import replace

import pytest

from betoken.common.economy import speedup
from betoken.common.economy.speedup import RoundCosts

NUM_ROUNDS = 12_000
COSTS = RoundCosts(draft=0.1, verify=1.2, verify_hop=0.05, draft_hop=0.03)
CASES = list(itertools.product((0.6, 0.9), (1, 5), (False, True)))


@pytest.mark.parametrize(
    "acceptance, num_draft_tokens, tokens",
    [(0.8, 4, 3.3616), (0.5, 1, 1.5), (0.0, 7, 1.0), (1.0, 7, 8.0), (0.3, 0, 1.0)],
)
def test_the_expected_block_length_equals_values_by_hand(acceptance, num_draft_tokens, tokens):
    assert speedup.expected_block_length(acceptance, num_draft_tokens) == pytest.approx(tokens)


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.8, 1.0])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_the_expected_block_length_equals_the_sum_over_all_outcomes(acceptance, length):
    expected = 0.0
    for accepted in itertools.product((True, False), repeat=length):
        chance = 1.0
        for one in accepted:
            chance *= acceptance if one else 1 - acceptance
        expected += chance * (1 + len(list(itertools.takewhile(bool, accepted))))
    assert speedup.expected_block_length(acceptance, length) == pytest.approx(expected)


def test_speedups_equal_values_by_hand():
    costs = RoundCosts(draft=0.1)  # tau of a = 0.8 and K = 4 is 3.3616
    assert speedup.synchronous_speedup(0.8, 4, costs) == pytest.approx(3.3616 / 1.4)
    assert speedup.overlapped_speedup(0.8, 4, costs, hit_rate=1.0) == pytest.approx(3.3616 / 1.0)
    assert speedup.overlapped_speedup(0.8, 4, costs, hit_rate=0.5) == pytest.approx(3.3616 / 1.2)
    slow = replace(costs, draft=0.3)  # a hit takes the five forwards of the draft
    assert speedup.overlapped_speedup(0.8, 4, slow, hit_rate=1.0) == pytest.approx(3.3616 / 1.5)
    parallel = replace(slow, is_parallel=True)
    assert speedup.synchronous_speedup(0.8, 4, parallel) == pytest.approx(3.3616 / 1.3)
    assert speedup.overlapped_speedup(0.8, 4, parallel, hit_rate=1.0) == pytest.approx(3.3616 / 1.0)
    slower = replace(parallel, draft=0.6)  # a hit takes two forwards, one of which ranks the outcomes
    assert speedup.overlapped_speedup(0.8, 4, slower, hit_rate=1.0) == pytest.approx(3.3616 / 1.2)


def simulated(acceptance: float, length: int, costs: RoundCosts, hit_rate: float | None) -> float:
    """Tokens per decode step of one sequence, round by round on a clock; `hit_rate` None = synchronous rounds."""
    rng, now, num_tokens = random.Random(0), 0.0, 0

    def drafted(begin: float, num: int) -> float:
        for _ in range(min(1, num) if costs.is_parallel else num):
            begin += costs.draft
        return begin

    is_hit = False
    for _ in range(NUM_ROUNDS):
        if is_hit:  # drafted ahead while the verification before was running
            verification_begin = now + costs.verify_hop / 2
        else:
            verification_begin = drafted(now + costs.draft_hop / 2, length) + costs.draft_hop / 2 + costs.verify_hop / 2
        verified = verification_begin + costs.verify
        is_hit = hit_rate is not None and rng.random() < hit_rate
        ahead = drafted(verification_begin + costs.draft, length)
        now = (max(verified, ahead) if is_hit else verified) + costs.verify_hop / 2
        num_tokens += 1 + next((i for i in range(length) if rng.random() >= acceptance), length)
    return num_tokens / now


@pytest.mark.parametrize("acceptance, length, is_parallel", CASES)
def test_the_synchronous_speedup_equals_a_simulation(acceptance, length, is_parallel):
    costs = replace(COSTS, is_parallel=is_parallel)
    expected = speedup.synchronous_speedup(acceptance, length, costs)
    assert simulated(acceptance, length, costs, None) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("acceptance, length, is_parallel", CASES)
def test_the_overlapped_speedup_equals_a_simulation(acceptance, length, is_parallel, hit_rate):
    """With a drafter that is faster than the target during a verification, and a slower one."""
    for draft in (0.1, 0.7):
        costs = replace(COSTS, is_parallel=is_parallel, draft=draft)
        expected = speedup.overlapped_speedup(acceptance, length, costs, hit_rate)
        assert simulated(acceptance, length, costs, hit_rate) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("hit_rate", [None, 0.0, 0.6, 1.0])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("draft", [0.01, 0.2, 0.7])
def test_the_speedup_at_the_break_even_costs_is_one(draft, length, hit_rate):
    costs = replace(COSTS, draft=draft)
    block_length = speedup.expected_block_length(0.8, length)

    def time_of(changed: RoundCosts) -> float:
        if hit_rate is None:
            return speedup.synchronous_round_time(length, changed)
        return speedup.overlapped_round_time(length, changed, hit_rate)

    for name, corner in (("verify", draft * (length + 1)), ("draft", costs.verify / (length + 1))):
        cost = speedup.break_even(lambda x: time_of(replace(costs, **{name: x})), corner, block_length)  # noqa: B023
        if cost:
            assert time_of(replace(costs, **{name: cost})) == pytest.approx(block_length)
        else:
            assert time_of(replace(costs, **{name: 0.0})) > block_length


def test_a_draft_of_one_token_breaks_even_at_a_draft_ratio_of_the_acceptance():
    costs = RoundCosts(draft=0.0)  # corollary 3.9 of arXiv:2211.17192
    time = lambda c: speedup.synchronous_round_time(1, replace(costs, draft=c))  # noqa: E731
    assert speedup.break_even(time, 0.5, speedup.expected_block_length(0.7, 1)) == pytest.approx(0.7)


@pytest.mark.parametrize("experts, active, num_tokens, read", [(8, 2, 1, 2.0), (8, 2, 2, 3.5), (4, 4, 9, 4.0)])
def test_distinct_experts_equal_values_by_hand(experts, active, num_tokens, read):
    assert speedup.distinct_experts(experts, active, num_tokens) == pytest.approx(read)


@pytest.mark.parametrize("experts, active, num_tokens", [(8, 2, 5), (64, 8, 4), (128, 8, 40)])
def test_distinct_experts_equal_a_simulation(experts, active, num_tokens):
    rng = random.Random(0)
    runs = [
        len({expert for _ in range(num_tokens) for expert in rng.sample(range(experts), active)}) for _ in range(2_000)
    ]
    assert sum(runs) / len(runs) == pytest.approx(speedup.distinct_experts(experts, active, num_tokens), rel=0.01)
