"""The speculation policy finds the faster side with simulated sequences, and tries the slower one rarely."""

import random

import pytest

from betoken.common.economy.policy import SpeculationPolicy, Step
from betoken.common.step_times import ForwardTimes


class Streams:
    """Sequences that commit in turn on a simulated clock; a step takes as long as its side and their number say."""

    def __init__(self, step_s: dict[bool, float], tokens: dict[bool, float], num_running: int = 1) -> None:
        self.now_s = 0.0
        self.prompts_per_s = 0.0
        self.prefill_s = 0.05
        self.token_s = 0.0
        """Time that each of a draft's five tokens adds, as reported by the worker; 0 = not reported."""
        self.step_s, self.tokens, self.num_running = step_s, tokens, num_running
        self.policy = SpeculationPolicy(lambda: self.num_running)
        self.random = random.Random(0)
        self.began_s = [0.0] * 64
        self.num_tokens = 0.0
        self.time_s = {True: 0.0, False: 0.0}

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            is_on = self.policy.is_on
            step_s = self.step_s[is_on] * self.random.uniform(0.7, 1.3)
            step_s += (self.random.random() < self.prompts_per_s * step_s) * self.prefill_s
            self.now_s += step_s
            self.time_s[is_on] += step_s
            for index in range(self.num_running):
                num = int(self.tokens[is_on] * self.random.uniform(0.0, 2.0) + 0.5)
                self.num_tokens += num
                if is_on == self.policy.is_on:  # as a speculator, which knows which way its step went
                    num_rows = 6 if is_on else 1
                    times = ForwardTimes(self.token_s)
                    self.policy.record(Step(self.began_s[index], self.now_s, num, num_rows, times=times))
                self.began_s[index] = self.now_s

    def speed(self, seconds: float) -> float:
        """Tokens per second from now on."""
        before = self.num_tokens
        self.run(seconds)
        return (self.num_tokens - before) / seconds


@pytest.mark.parametrize("num_running", [1, 16])
def test_drafts_that_cost_more_than_they_bring_are_left_out(num_running: int) -> None:
    streams = Streams({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0}, num_running)
    streams.run(5)
    assert streams.speed(120) > 0.95 * 100 * num_running  # 50 with drafts, 100 without
    assert streams.time_s[True] < 10


@pytest.mark.parametrize("num_running", [1, 16])
def test_drafts_that_pay_go_on(num_running: int) -> None:
    streams = Streams({True: 0.02, False: 0.01}, {True: 3.0, False: 1.0}, num_running)
    assert streams.speed(120) > 0.95 * 150 * num_running
    assert streams.time_s[False] < 5


def test_prompts_that_come_in_between_do_not_hide_what_is_faster() -> None:
    shares = []
    for seed in range(3):
        streams = Streams({True: 0.032, False: 0.012}, {True: 2.3, False: 1.0}, 16)  # a seventh slower with drafts
        streams.random.seed(seed)
        streams.prompts_per_s = 10.0
        streams.run(300)
        shares.append(streams.time_s[True] / 300)
    assert sum(shares) / len(shares) < 0.13  # 0.2 with trials of a tenth of a second


def test_no_trial_of_drafts_runs_in_the_first_second() -> None:
    streams = Streams({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0})
    streams.run(0.9)
    assert streams.time_s[False] == 0.0


def test_drafts_that_pay_off_again_are_found() -> None:
    streams = Streams({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0})
    streams.run(20)
    assert not streams.policy.is_on
    streams.step_s[True] = 0.015
    streams.run(120)
    assert streams.policy.is_on
    assert streams.speed(60) > 0.95 * 200


def test_the_policy_judges_few_and_many_sequences_separately() -> None:
    streams = Streams({True: 0.02, False: 0.01}, {True: 3.0, False: 1.0})
    streams.run(10)
    streams.num_running, streams.step_s[True] = 16, 0.06
    streams.run(20)
    assert not streams.policy.is_on
    streams.num_running, streams.step_s[True] = 1, 0.02
    streams.run(0.2)
    assert streams.policy.is_on
    streams.num_running, streams.step_s[True] = 16, 0.06
    streams.run(0.2)
    assert not streams.policy.is_on


def test_an_unknown_number_of_sequences_begins_like_the_nearest_known() -> None:
    streams = Streams({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0})
    streams.run(3)
    drafting_s = streams.time_s[True]
    streams.num_running = 4
    streams.run(0.1)
    assert streams.time_s[True] == drafting_s


def test_a_wavering_number_of_sequences_does_not_cause_constant_trials() -> None:
    streams = Streams({True: 0.02, False: 0.01}, {True: 3.0, False: 1.0})
    for _ in range(600):
        for streams.num_running in (11, 12):
            streams.run(0.1)
    assert streams.time_s[False] < 6  # of 120


def test_a_step_that_began_the_other_way_does_not_count() -> None:
    streams = Streams({True: 0.02, False: 0.01}, {True: 1.0, False: 1.0})
    while streams.policy.is_on:
        streams.run(0.02)
    for _ in range(100):
        streams.policy.record(Step(streams.now_s - 5.0, streams.now_s, 1))  # would end the trial
    assert not streams.policy.is_on


def test_idle_time_does_not_count_towards_a_trial() -> None:
    streams = Streams({True: 0.02, False: 0.012}, {True: 2.0, False: 1.0})
    streams.run(5)
    while streams.policy.is_on:
        streams.run(0.02)
    streams.now_s += 600.0
    streams.began_s = [streams.now_s] * len(streams.began_s)
    streams.run(2)  # a trial lasts 120 decode steps at most
    assert streams.policy.is_on
    plain_s = streams.time_s[False]
    streams.run(30)
    assert streams.time_s[False] > plain_s  # tried again: the pause followed what the trial cost, not what it lasted


def test_many_sequences_begin_as_the_token_price_predicts() -> None:
    """Known before any trial: a draft's five rows make a step of sixteen six times as long, for three tokens."""
    streams = Streams({True: 0.06, False: 0.01}, {True: 3.0, False: 1.0}, 16)
    streams.token_s = 0.05 / (5 * 16)
    streams.run(1.0)
    assert streams.time_s[True] < 0.1
    streams = Streams({True: 0.015, False: 0.01}, {True: 3.0, False: 1.0}, 16)
    streams.token_s = 0.005 / (5 * 16)
    streams.run(1.0)
    assert streams.time_s[False] < 0.3


def test_slow_first_drafts_of_a_lone_sequence_do_not_end_drafting() -> None:
    policy, times, now_s = SpeculationPolicy(lambda: 1), ForwardTimes(token_s=0.0002, decode_s=0.0025), 0.0
    for number in range(20):
        waiting_s = 0.1 if number < 2 else 0.002
        step_s = 0.0035 + waiting_s
        policy.record(Step(now_s, now_s + step_s, 4, 6, waiting_s, times))
        now_s += step_s
        assert policy.is_on
