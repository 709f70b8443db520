"""The gate: finds the faster way with a simulated crowd, and tries the slower one rarely."""

import random

import pytest

from betoken.common.economy.gate import SpeculationGate, Step


class Crowd:
    """Sequences that commit in turn on a simulated clock; a step takes as long as the way and the crowd's size say."""

    def __init__(self, step_s: dict[bool, float], tokens: dict[bool, float], num_running: int = 1) -> None:
        self.now_s = 0.0
        self.prompts_per_s = 0.0
        self.prefill_s = 0.05
        self.row_s = 0.0
        """Time that each of a draft's five tokens adds, as reported by the worker; 0 = not reported."""
        self.step_s, self.tokens, self.num_running = step_s, tokens, num_running
        self.gate = SpeculationGate(lambda: self.num_running)
        self.random = random.Random(0)
        self.began_s = [0.0] * 64
        self.num_tokens = 0.0
        self.time_s = {True: 0.0, False: 0.0}

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            is_open = self.gate.is_open
            step_s = self.step_s[is_open] * self.random.uniform(0.7, 1.3)
            step_s += (self.random.random() < self.prompts_per_s * step_s) * self.prefill_s
            self.now_s += step_s
            self.time_s[is_open] += step_s
            for index in range(self.num_running):
                num = int(self.tokens[is_open] * self.random.uniform(0.0, 2.0) + 0.5)
                self.num_tokens += num
                if is_open == self.gate.is_open:  # as a speculator, which knows which way its step went
                    num_rows = 6 if is_open else 1
                    self.gate.record(Step(self.began_s[index], self.now_s, num, num_rows, row_s=self.row_s))
                self.began_s[index] = self.now_s

    def speed(self, seconds: float) -> float:
        """Tokens per second from now on."""
        before = self.num_tokens
        self.run(seconds)
        return (self.num_tokens - before) / seconds


@pytest.mark.parametrize("num_running", [1, 16])
def test_drafts_that_cost_more_than_they_bring_are_left_out(num_running: int) -> None:
    crowd = Crowd({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0}, num_running)
    crowd.run(5)
    assert crowd.speed(120) > 0.95 * 100 * num_running  # 50 with drafts, 100 without
    assert crowd.time_s[True] < 10


@pytest.mark.parametrize("num_running", [1, 16])
def test_drafts_that_pay_go_on(num_running: int) -> None:
    crowd = Crowd({True: 0.02, False: 0.01}, {True: 3.0, False: 1.0}, num_running)
    assert crowd.speed(120) > 0.95 * 150 * num_running
    assert crowd.time_s[False] < 5


def test_prompts_that_come_in_between_do_not_hide_what_is_faster() -> None:
    shares = []
    for seed in range(3):
        crowd = Crowd({True: 0.032, False: 0.012}, {True: 2.3, False: 1.0}, 16)  # a seventh slower with drafts
        crowd.random.seed(seed)
        crowd.prompts_per_s = 10.0
        crowd.run(600)
        shares.append(crowd.time_s[True] / 600)
    assert sum(shares) / len(shares) < 0.13  # 0.2 with trials of a tenth of a second


def test_no_trial_of_drafts_runs_in_the_first_second() -> None:
    crowd = Crowd({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0})
    crowd.run(0.9)
    assert crowd.time_s[False] == 0.0


def test_drafts_that_pay_off_again_are_found() -> None:
    crowd = Crowd({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0})
    crowd.run(20)
    assert not crowd.gate.is_open
    crowd.step_s[True] = 0.015
    crowd.run(120)
    assert crowd.gate.is_open
    assert crowd.speed(60) > 0.95 * 200


def test_the_gate_judges_few_and_many_sequences_separately() -> None:
    crowd = Crowd({True: 0.02, False: 0.01}, {True: 3.0, False: 1.0})
    crowd.run(10)
    crowd.num_running, crowd.step_s[True] = 16, 0.06
    crowd.run(20)
    assert not crowd.gate.is_open
    crowd.num_running, crowd.step_s[True] = 1, 0.02
    crowd.run(0.2)
    assert crowd.gate.is_open
    crowd.num_running, crowd.step_s[True] = 16, 0.06
    crowd.run(0.2)
    assert not crowd.gate.is_open


def test_an_unknown_number_of_sequences_begins_like_the_nearest_known() -> None:
    crowd = Crowd({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0})
    crowd.run(3)
    drafting_s = crowd.time_s[True]
    crowd.num_running = 4
    crowd.run(0.1)
    assert crowd.time_s[True] == drafting_s


def test_a_wavering_number_of_sequences_does_not_cause_constant_trials() -> None:
    crowd = Crowd({True: 0.02, False: 0.01}, {True: 3.0, False: 1.0})
    for _ in range(600):
        for crowd.num_running in (11, 12):
            crowd.run(0.1)
    assert crowd.time_s[False] < 6  # of 120


def test_a_step_that_began_the_other_way_does_not_count() -> None:
    crowd = Crowd({True: 0.02, False: 0.01}, {True: 1.0, False: 1.0})
    while crowd.gate.is_open:
        crowd.run(0.02)
    for _ in range(100):
        crowd.gate.record(Step(crowd.now_s - 5.0, crowd.now_s, 1))  # would end the trial
    assert not crowd.gate.is_open


def test_idle_time_does_not_count_towards_a_trial() -> None:
    crowd = Crowd({True: 0.02, False: 0.012}, {True: 2.0, False: 1.0})
    crowd.run(5)
    while crowd.gate.is_open:
        crowd.run(0.02)
    crowd.now_s += 600.0
    crowd.began_s = [crowd.now_s] * len(crowd.began_s)
    crowd.run(1)
    assert crowd.gate.is_open
    plain_s = crowd.time_s[False]
    crowd.run(30)
    assert crowd.time_s[False] > plain_s  # tried again: the pause followed what the trial cost, not what it lasted


def test_many_sequences_begin_as_the_token_price_predicts() -> None:
    """Known before any trial: a draft's five rows make a step of sixteen six times as long, for three tokens."""
    crowd = Crowd({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0}, 16)
    crowd.row_s = 0.05 / (5 * 16)
    crowd.run(1.0)
    assert crowd.time_s[True] < 0.1
    crowd = Crowd({True: 0.015, False: 0.01}, {True: 3.0, False: 1.0}, 16)
    crowd.row_s = 0.005 / (5 * 16)
    crowd.run(1.0)
    assert crowd.time_s[False] < 0.3
