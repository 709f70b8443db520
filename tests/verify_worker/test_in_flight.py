"""Forwards under way at the same time, as pipeline stages have them: the tokens of the target, whatever happens."""

import random

import pytest

from tests.verify_worker.harness import Bench

PROMPTS = {n: list(range(n, 2 * n + 3)) for n in range(1, 7)}


@pytest.fixture
def staged(fake_runner_class):
    """A core whose runner has two forwards under way, and a list of their beginnings and ends."""
    runner = fake_runner_class()
    runner.max_in_flight, events = 2, []
    begin, finish = runner.begin, runner.finish

    def begin_noted(segments):
        events.append("begin")
        return begin(segments)

    def finish_noted(segments):
        events.append("finish")
        return finish(segments)

    runner.begin, runner.finish = begin_noted, finish_noted
    return Bench(runner), events


def test_a_forward_begins_before_the_last_one_finishes(staged):
    bench, events = staged
    for n, prompt in PROMPTS.items():
        bench.open(n, prompt)
        bench.grant(n, len(prompt), 12)
    bench.run()
    assert events[:5] == ["begin", "begin", "finish", "begin", "finish"] and not bench.core._in_flight
    for n, prompt in PROMPTS.items():
        assert bench.emitted(n, {}) == bench.runner.complete(prompt, 12)


def test_sequences_that_are_closed_or_reopened_in_flight_disturb_no_others(staged):
    bench, _ = staged
    rng = random.Random(3)
    for n, prompt in PROMPTS.items():
        bench.open(n, prompt)
        bench.grant(n, len(prompt), 20)
    for n in range(10, 40):
        bench.step()
        bench.check_integrity()
        bench.open(n, PROMPTS[1 + n % 6])
        bench.grant(n, len(PROMPTS[1 + n % 6]), 3)
        if rng.random() < 0.7:
            bench.step()
            bench.close(n)
            bench.check_integrity()
    bench.run()
    for n, prompt in PROMPTS.items():
        assert bench.emitted(n, {}) == bench.runner.complete(prompt, 20)


def test_a_block_for_a_sequence_in_flight_waits_for_its_decision(staged):
    bench, _ = staged
    for n, prompt in PROMPTS.items():
        bench.open(n, prompt)
        bench.run()
        bench.grant(n, len(prompt), 1)
    bench.step()
    (n, *_) = [work.sequence.key[1] for work in bench.core._in_flight[0].planned]
    length = len(PROMPTS[n])
    truth = bench.runner.complete(PROMPTS[n], 4)
    bench.block(n, length, truth[:3])
    assert bench.sink.stales == [((1, n), length + 1)]
    bench.block(n, length + 1, truth[1:3])
    bench.run()
    assert bench.emitted(n, {length + 1: truth[1:3]}) == truth


def test_a_failing_forward_ends_its_sequences_and_no_others(staged):
    bench, _ = staged
    for n, prompt in PROMPTS.items():
        bench.open(n, prompt)
        bench.grant(n, len(prompt), 8)
    bench.step()
    failing = {work.sequence.key for work in bench.core._in_flight[0].planned}
    bench.runner.fail_next = True
    bench.run()
    assert set(bench.sink.failures) == failing and len(failing) < len(PROMPTS)
    for n, prompt in PROMPTS.items():
        if (1, n) not in failing:
            assert bench.emitted(n, {}) == bench.runner.complete(prompt, 8)
