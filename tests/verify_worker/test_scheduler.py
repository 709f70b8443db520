"""The scheduler: whose pages are taken, which prompts and drafts share a forward, and long prompts."""

import time

import pytest

from betoken.rpc.link.commands import Close
from betoken.verify_worker.scheduler import IDLE_GRACE_S
from tests.verify_worker.harness import Bench


def test_preemption_changes_no_token(fake_runner_class):
    """Six sequences, pages for two: the youngest are preempted and recomputed, every answer is the same."""
    bench = Bench(fake_runner_class(num_pages=16, page_size=4, max_context=64))
    prompts = {n: [n, n + 1, n + 2] * 4 for n in range(1, 7)}
    for n, prompt in prompts.items():
        bench.open(n, prompt, max_length=64)
        bench.block(n, len(prompt), [], 20)
    bench.run()
    for n, prompt in prompts.items():
        assert bench.emitted(n, {}) == bench.runner.complete(prompt, 20)
    assert bench.scheduler.num_preemptions > 0
    for n in prompts:
        bench.core.apply(Close((1, n)))
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages == 16


def test_sequences_that_outgrow_the_pages_do_not_recompute_their_prompts_in_turn(fake_runner_class):
    """Pages for six prompts, answers of four times their length: what a preempted one has left is for the others."""
    bench = Bench(fake_runner_class(num_pages=30, page_size=4, max_context=96))
    prompts = {n: [n] * 19 for n in range(1, 11)}
    for n, prompt in prompts.items():
        bench.open(n, prompt, max_length=19 + 76)
        bench.block(n, len(prompt), [], 76)
    while bench.core.has_work:
        bench.core.step()
        for key in [key for key, seq in bench.core._sequences.items() if seq.is_finished]:
            bench.core.apply(Close(key))
    assert all(bench.emitted(n, {}) == bench.runner.complete(prompt, 76) for n, prompt in prompts.items())
    assert bench.scheduler.num_preemptions > 0
    assert sum(bench.runner.forwards) < 2 * sum(len(prompt) + 76 for prompt in prompts.values())


def test_idle_sequences_give_up_their_pages_to_waiting_ones(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=4, page_size=4, max_context=16))
    long_prompt = list(range(12))
    bench.open(1, long_prompt, max_length=16)
    bench.run()
    bench.open(2, [1, 2, 3], max_length=16)
    bench.block(2, 3, [], 4)
    bench.run()
    assert bench.emitted(2, {}) == bench.runner.complete([1, 2, 3], 4)
    bench.block(1, 12, [], 4)
    bench.run()
    assert bench.emitted(1, {}) == bench.runner.complete(long_prompt, 4)


def test_a_younger_sequence_leaves_an_older_its_pages_between_two_rounds(fake_runner_class, clock):
    bench = Bench(fake_runner_class(num_pages=4, page_size=4, max_context=16), idle_grace_s=60.0)
    long_prompt = list(range(13))  # all pages
    bench.open(1, long_prompt, max_length=16)
    bench.block(1, 13, [], 1)
    bench.run()
    bench.open(2, [1, 2, 3], max_length=16)
    bench.block(2, 3, [], 4)
    for length in (14, 15):
        bench.run()
        bench.block(1, length, [], 1)
    bench.run()
    assert bench.emitted(1, {}) == bench.runner.complete(long_prompt, 3)
    assert bench.scheduler.num_preemptions == 0 and not bench.emitted(2, {})
    wake_at_s = bench.core.expire(time.monotonic())
    assert wake_at_s is not None and not bench.core.has_work  # it does not spin in the meantime
    clock.advance(wake_at_s - time.monotonic() + 60.0)
    bench.core.expire(time.monotonic())
    bench.run()
    assert bench.emitted(2, {}) == bench.runner.complete([1, 2, 3], 4)
    assert bench.scheduler.num_preemptions == 1


def test_a_block_that_takes_some_tenths_of_a_second_to_come_costs_no_pages(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=4, page_size=4, max_context=16), idle_grace_s=IDLE_GRACE_S)
    bench.open(1, range(13), max_length=16)  # all pages
    bench.block(1, 13, [], 1)
    bench.run()
    bench.open(2, [1, 2, 3], max_length=16)
    bench.block(2, 3, [], 1)
    for waited_s, num_preemptions in ((0.3, 0), (0.3, 1)):
        bench.core._sequences[1, 1].idle_since_ns -= round(waited_s * 1e9)
        bench.core.expire(time.monotonic() + 1)
        bench.run()
        assert bench.scheduler.num_preemptions == num_preemptions


def test_a_prompt_that_took_long_is_not_given_up_before_its_first_block_can_come(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=4, page_size=4, max_context=16), idle_grace_s=60.0)
    long_prompt = list(range(14))  # all pages
    bench.open(1, long_prompt, max_length=16)
    bench.core._sequences[(1, 1)].idle_since_ns -= 61 * 10**9  # as if its forwards took so long
    bench.run()
    bench.open(2, [1, 2, 3], max_length=16)
    bench.block(2, 3, [], 1)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    bench.block(1, 14, [], 1)
    bench.run()
    assert bench.emitted(1, {}) == bench.runner.complete(long_prompt, 1) and sum(bench.runner.forwards) == 14


@pytest.mark.parametrize("draft_ids", [[5], []])
def test_a_prompt_keeps_its_place_if_its_first_block_comes_before_its_prefill_ends(bench, draft_ids):
    for sequence_id in (1, 2):
        bench.open(sequence_id, [sequence_id] * 100)
    bench.core.step()
    time.sleep(0.05)
    asked_ns = time.perf_counter_ns()
    for sequence_id in (1, 2):  # the first one's drafter is done while the other one's still reads its prompt
        bench.block(sequence_id, 100, draft_ids, 1)
        bench.core.step()
    bench.core.step()
    (decision,) = bench.sink.decisions
    assert decision.key == (1, 1) and bench.core._sequences[(1, 2)].num_missing_kv > 0
    assert 0 < decision.queue_ns <= time.perf_counter_ns() - asked_ns  # not since it was opened


def test_a_long_prompt_does_not_stall_a_running_stream(bench):
    bench.open(1, [1, 2])
    bench.block(1, 2, [], 20)
    bench.core.step()
    bench.open(2, [n % 90 for n in range(100)])
    bench.block(2, 100, [], 1)
    before = len(bench.sink.decisions)
    bench.core.step()
    bench.core.step()
    assert len([d for d in bench.sink.decisions[before:] if d.key == (1, 1)]) == 2
    assert max(bench.runner.forwards) <= 1 + 8
    bench.run()
    assert bench.emitted(2, {}) == bench.runner.complete([n % 90 for n in range(100)], 1)


def test_a_long_prompt_does_not_stall_a_stream_whose_next_block_is_still_to_come(fake_runner_class):
    """With a drafter that is nearly always so when the worker looks for work."""
    bench = Bench(fake_runner_class(), idle_grace_s=60.0)
    bench.open(1, [1, 2])
    bench.block(1, 2, [5])
    bench.run()
    bench.open(2, [n % 90 for n in range(100)])
    bench.core.step()
    assert bench.runner.forwards[-1] == 8
    bench.core._sequences[(1, 1)].idle_since_ns -= 61 * 10**9  # it does not come: prompts need not wait for it
    bench.core.step()
    assert bench.runner.forwards[-1] == 32


@pytest.mark.parametrize("max_prefill_tokens", [8, 32])
def test_a_long_prompt_leaves_room_for_a_block(fake_runner_class, max_prefill_tokens):
    bench = Bench(fake_runner_class(), max_rows=20, max_prefill_tokens=max_prefill_tokens)
    bench.open(1, [1, 2])
    bench.run()
    bench.open(2, [n % 90 for n in range(100)])
    bench.block(2, 100, [], 1)
    bench.block(1, 2, [9] * 16)
    bench.core.step()
    assert [decision.key for decision in bench.sink.decisions] == [(1, 1)]
    bench.run()
    assert bench.emitted(2, {}) == bench.runner.complete([n % 90 for n in range(100)], 1)


@pytest.mark.parametrize("max_rows", [3, 4, 7])
def test_batches_never_exceed_the_row_budget(fake_runner_class, max_rows):
    bench = Bench(fake_runner_class(), max_rows=max_rows, max_prefill_tokens=2)
    for n in range(1, 5):
        bench.open(n, [n] * 9)
        bench.block(n, 9, [1, 2])
    bench.run()
    assert max(bench.runner.forwards) <= max_rows
    assert len(bench.sink.decisions) == 4


def test_no_sequence_loses_pages_for_one_that_cannot_start(fake_runner_class):
    """The first sequence, not idle for long, keeps two of four pages: the last one's would not be enough."""
    bench = Bench(fake_runner_class(num_pages=4, page_size=4), idle_grace_s=1000.0)
    for sequence_id, num_ids in ((1, 7), (3, 3)):
        bench.open(sequence_id, [sequence_id] * num_ids, max_length=num_ids + 1)
        bench.block(sequence_id, num_ids, [], 1)
    bench.run()
    bench.open(2, [2] * 11, max_length=12)
    bench.core._sequences[(1, 3)].order = 9  # preempted before, the second is older
    bench.block(2, 11, [], 1)
    bench.core.step()
    held = {key: len(seq.page_ids) for key, seq in bench.core._sequences.items()}
    assert held == {(1, 1): 2, (1, 2): 0, (1, 3): 1} and bench.scheduler.num_preemptions == 0
    bench.core.apply(Close((1, 1)))
    bench.run()
    assert bench.emitted(2, {}) == bench.runner.complete([2] * 11, 1)
