"""The verify core commits exactly the target's tokens, whatever blocks, batches and page shortages it meets."""

import random
import time
from unittest.mock import Mock

import pytest
import torch

from betoken.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from betoken.common.names import ERROR_TYPE, NUM_ACCEPTED, NUM_DRAFT_TOKENS
from betoken.engine.sparse_probs import SparseProbs
from betoken.engine.verification import VerificationMode as Mode
from betoken.rpc.link import sequence_table
from betoken.rpc.link.commands import Close, CloseLink
from betoken.verify_worker.scheduler import IDLE_GRACE_S
from tests.verify_worker.harness import EOS, Bench


@pytest.fixture
def bench(fake_runner_class):
    return Bench(fake_runner_class())


def test_a_right_draft_is_accepted_whole_and_gives_a_bonus_token(bench):
    prompt = [1, 2, 3]
    truth = bench.runner.complete(prompt, 5)
    bench.open(1, prompt)
    bench.block(1, 3, truth[:4])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id, decision.num_draft_tokens) == (4, truth[4], 4)


def test_a_wrong_draft_gives_the_recovered_token(bench):
    prompt = [5]
    truth = bench.runner.complete(prompt, 3)
    wrong = (truth[1] + 1) % 90
    bench.open(1, prompt)
    bench.block(1, 1, [truth[0], wrong, truth[2]])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id) == (1, truth[1])


def test_kv_length_is_committed_length_less_one_after_every_verdict(bench):
    bench.open(1, [1, 2, 3, 4, 5])
    bench.block(1, 5, [9, 9, 9])
    bench.run()
    (seq,) = bench.core._sequences.values()
    assert seq.kv_length == seq.committed_length - 1 == 5


def test_any_drafts_give_the_same_tokens(bench):
    rng = random.Random(7)
    prompts = {n: [rng.randrange(90) for _ in range(rng.randrange(1, 30))] for n in range(1, 7)}
    truth = {n: bench.runner.complete(prompt, 40) for n, prompt in prompts.items()}
    drafts = {n: {} for n in prompts}
    lengths = {n: len(prompt) for n, prompt in prompts.items()}
    for n, prompt in prompts.items():
        bench.open(n, prompt)
    for _ in range(40):
        for n, prompt in prompts.items():
            done = lengths[n] - len(prompt)
            draft = [token if rng.random() < 0.7 else rng.randrange(90) for token in truth[n][done : done + 4]]
            drafts[n][lengths[n]] = draft
            bench.block(n, lengths[n], draft, num_plain_steps=0)
        bench.run()
        for decision in bench.sink.decisions:
            lengths[decision.key[1]] = decision.base_length + decision.num_accepted + 1
        if all(lengths[n] - len(prompts[n]) > 30 for n in prompts):
            break
    for n in prompts:
        emitted = bench.emitted(n, drafts[n])
        assert emitted[:30] == truth[n][:30]


def test_a_grant_decodes_alone_and_is_idempotent(bench):
    prompt = [1, 2]
    truth = bench.runner.complete(prompt, 20)
    bench.open(1, prompt)
    bench.block(1, 2, [], num_plain_steps=8)
    bench.block(1, 2, [], num_plain_steps=8)
    bench.run()
    assert bench.emitted(1, {}) == truth[:8]
    bench.block(1, 6, [], num_plain_steps=8)  # renewed from an older length: reaches 6 + 8
    bench.run()
    assert bench.emitted(1, {}) == truth[:12]
    assert not bench.sink.stales


def test_plain_steps_follow_a_block(bench):
    truth = bench.runner.complete([4], 8)
    bench.open(1, [4])
    bench.block(1, 1, truth[:2], num_plain_steps=3)
    bench.run()
    assert bench.emitted(1, {1: truth[:2]}) == truth[:4]  # up to base + 1 + 3 committed ids


def test_a_grant_ends_at_eos_stop_ids_and_max_length(bench):
    truth = bench.runner.complete([8, 9], 30)
    bench.open(1, [8, 9], ignore_eos=False, stop_token_ids=(truth[4],))
    bench.block(1, 2, [], num_plain_steps=30)
    bench.open(2, [8, 9], max_length=12)
    bench.block(2, 2, [], num_plain_steps=30)
    bench.run()
    assert bench.emitted(1, {}) == truth[: truth.index(truth[4]) + 1]
    assert bench.emitted(2, {}) == truth[:10]


@pytest.mark.parametrize("ends", [{"ignore_eos": False}, {"stop_token_ids": (EOS,)}])
@pytest.mark.parametrize(("min_new_tokens", "num_more"), [(0, 0), (1, 0), (2, 4), (5, 4)])
def test_an_end_id_of_resumed_output_counts_from_min_new_tokens_on(bench, ends, min_new_tokens, num_more):
    bench.open(1, [1, 2], [7, EOS, 8], min_new_tokens=min_new_tokens, **ends)
    bench.block(1, 5, [], 4)
    bench.run()
    assert bench.emitted(1, {}) == bench.runner.complete([1, 2, 7, EOS, 8], num_more)


def test_a_block_on_another_base_is_stale_and_changes_nothing(bench):
    bench.open(1, [1, 2, 3])
    bench.block(1, 7, [5, 6])
    bench.run()
    assert bench.sink.stales == [((1, 1), 3)]
    assert not bench.sink.decisions
    bench.block(1, 3, [], 1)
    bench.run()
    assert bench.emitted(1, {}) == bench.runner.complete([1, 2, 3], 1)


def test_reopening_with_committed_ids_continues_the_same_text(bench):
    truth = bench.runner.complete([3, 1], 12)
    bench.open(1, [3, 1], output_ids=truth[:5])
    bench.block(1, 7, [], 7)
    bench.run()
    assert bench.emitted(1, {}) == truth[5:12]


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


def test_streams_that_outgrow_the_pages_do_not_take_turns_at_computing_their_prompts(fake_runner_class):
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


def test_opens_and_closes_report_the_load_even_without_a_forward(fake_runner_class):
    """Without it a router that found this worker silent would not learn that it is at work again."""
    bench = Bench(fake_runner_class())
    for act, num_open in ((lambda: bench.open(1, [1, 2, 3]), 1), (lambda: bench.core.apply(Close((1, 1))), 0)):
        bench.sink.load = None
        act()
        assert bench.sink.load.num_running + bench.sink.load.num_waiting == num_open


@pytest.mark.parametrize("max_sequences", [1, 8])
def test_what_is_opened_twice_is_closed_as_its_error_says(fake_runner_class, max_sequences):
    bench = Bench(fake_runner_class(), max_sequences=max_sequences)
    for _ in range(2):
        bench.open(1, [1, 2, 3])
    assert isinstance(bench.sink.failures[(1, 1)], FailedPreconditionError)
    assert bench.sink.load.num_running == 0 and not bench.core._sequences


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
def test_a_prompt_keeps_its_place_when_its_first_block_comes_before_it_is_computed(bench, draft_ids):
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


def test_nor_one_whose_next_block_is_still_to_come(fake_runner_class):
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


def test_blocks_that_wait_long_are_named_until_their_verdict(fake_runner_class, monkeypatch):
    bench = Bench(fake_runner_class(), max_rows=16)
    monkeypatch.setattr(sequence_table, "PENDING_INTERVAL_S", 0.0)
    for sequence_id in (1, 2):
        bench.open(sequence_id, [sequence_id, 2, 3] * 13)
        bench.block(sequence_id, 39, [], num_plain_steps=1)
    bench.open(3, [1, 2])  # without a pending draft
    bench.run()
    first, second = (1, 1), (1, 2)
    assert bench.sink.pendings == [[first, second], [first, second], [second], [second]]
    assert [decision.key for decision in bench.sink.decisions] == [first, second]


def test_a_short_wait_is_not_worth_a_word(bench, monkeypatch):
    monkeypatch.setattr(sequence_table, "PENDING_INTERVAL_S", 60.0)
    bench.open(1, [1, 2, 3] * 13)
    bench.block(1, 39, [], num_plain_steps=5)
    bench.run()
    assert bench.sink.decisions and not bench.sink.pendings


@pytest.mark.parametrize("max_prefill_rows", [8, 32])
def test_a_long_prompt_leaves_room_for_a_block(fake_runner_class, max_prefill_rows):
    bench = Bench(fake_runner_class(), max_rows=20, max_prefill_rows=max_prefill_rows)
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
    bench = Bench(fake_runner_class(), max_rows=max_rows, max_prefill_rows=2)
    for n in range(1, 5):
        bench.open(n, [n] * 9)
        bench.block(n, 9, [1, 2])
    bench.run()
    assert max(bench.runner.forwards) <= max_rows
    assert len(bench.sink.decisions) == 4


def test_faults_of_one_sequence_are_typed_and_leave_the_others(bench):
    bench.open(1, [1, 2, 3], max_length=6)
    bench.open(2, [4, 5])
    bench.block(9, 3, [1])
    bench.block(1, 3, [1, 2, 3, 4])
    bench.open(2, [4, 5])
    assert isinstance(bench.sink.failures[(1, 9)], NotFoundError)
    assert isinstance(bench.sink.failures[(1, 1)], InvalidArgumentError)
    assert isinstance(bench.sink.failures[(1, 2)], FailedPreconditionError)
    bench.open(3, [7])
    bench.block(3, 1, [1])
    bench.block(3, 1, [2])
    assert isinstance(bench.sink.failures[(1, 3)], FailedPreconditionError)
    bench.open(4, [7])
    bench.block(4, 1, [], 3)
    bench.run()
    assert bench.emitted(4, {}) == bench.runner.complete([7], 3)


def test_too_many_sequences_are_refused_before_work(fake_runner_class):
    bench = Bench(fake_runner_class(), max_sequences=1)
    bench.open(1, [1])
    bench.open(2, [1])
    assert isinstance(bench.sink.failures[(1, 2)], ResourceExhaustedError)


def test_a_sequence_larger_than_all_pages_is_refused(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=4, page_size=4))
    bench.open(1, [1], max_length=17)
    error = bench.sink.failures[(1, 1)]
    assert (error.field, error.value) == ("open.max_length", "17")


def test_every_span_ends_also_of_what_is_refused(fake_runner_class):
    bench = Bench(fake_runner_class(), max_sequences=2)
    spans = {name: Mock() for name in ("taken", "repeated", "too long", "left", "one too many")}
    bench.open(1, [1], span=spans["taken"])
    bench.open(1, [1], span=spans["repeated"])
    bench.open(2, [1], max_length=100_000, span=spans["too long"])
    bench.open(3, [1], span=spans["left"])
    bench.open(4, [1])
    bench.open(5, [1], span=spans["one too many"])
    bench.core.apply(CloseLink(1))
    assert {name: span.end.call_count for name, span in spans.items()} == dict.fromkeys(spans, 1)
    spans["one too many"].set_attribute.assert_called_once_with(ERROR_TYPE, "RESOURCE_EXHAUSTED")
    spans["taken"].set_status.assert_not_called()


@pytest.mark.parametrize(("has_end", "num_kept"), [(False, 5), (True, 3)])
def test_what_is_accepted_beyond_an_end_id_is_not_counted(bench, has_end, num_kept):
    prompt = [3, 4, 5]
    bench.open(1, prompt)
    bench.block(1, 3, [], num_plain_steps=5)
    bench.run()
    own, span = bench.emitted(1, {}), Mock()
    assert len(set(own)) == len(own) == 5
    bench.open(2, prompt, span=span, stop_token_ids=(own[2],) if has_end else ())
    bench.block(2, 3, own[:4])
    bench.run()
    decision = bench.sink.decisions[-1]
    assert (decision.num_accepted, decision.num_kept) == (4, num_kept)
    bench.core.apply(Close((1, 2)))
    span.set_attributes.assert_called_once_with({NUM_DRAFT_TOKENS: 4, NUM_ACCEPTED: min(4, num_kept)})


def test_a_failing_forward_ends_its_sequences_only(bench):
    bench.open(1, [1])
    bench.block(1, 1, [], 2)
    bench.runner.fail_next = True
    bench.core.step()
    assert isinstance(bench.sink.failures[(1, 1)], InternalError)
    bench.open(2, [1])
    bench.block(2, 1, [], 2)
    bench.run()
    assert bench.emitted(2, {}) == bench.runner.complete([1], 2)
    bench.core.check_integrity()


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


class SickRunner:
    """The fake model, but the logits after id 13 hold NaN."""

    def __init__(self, runner):
        self.runner = runner

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def forward(self, segments):
        output = self.runner.forward(segments)
        logits = output.logits
        last_ids = [id_ for segment in segments for id_ in segment.ids[len(segment.ids) - segment.num_logits :]]
        logits[[id_ == 13 for id_ in last_ids]] = torch.nan
        return output


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION, Mode.TYPICAL])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_choose_no_token_fail_their_sequence_alone(fake_runner_class, mode, temperature):
    runner = fake_runner_class()
    bench = Bench(SickRunner(runner))
    params = {"temperature": temperature, "top_k": 1, "mode": mode, "num_logprobs": 0}
    bench.open(1, [5, 13], **params)
    bench.open(2, [5, 6], **params)
    truth = runner.complete([5, 6], 3)
    bench.block(1, 2, [4, 4])
    bench.block(2, 2, [*truth[:1], 13, 7])
    bench.run()
    assert isinstance(bench.sink.failures.pop((1, 1)), InternalError) and not bench.sink.failures
    (decision,) = bench.sink.decisions
    assert (decision.key, decision.num_accepted, decision.next_id) == ((1, 2), 1, truth[1])
    bench.core.apply(Close((1, 2)))
    assert runner.page_table.num_free == runner.page_table.num_pages


@pytest.mark.parametrize("parents", [[], [-1, 0, 0]])
def test_what_is_accepted_before_such_logits_is_kept(fake_runner_class, parents):
    runner = fake_runner_class()
    runner.next_id = lambda context: {5: 6, 6: 13}.get(context[-1], 0)
    bench = Bench(SickRunner(runner))
    bench.open(1, [5])
    bench.block(1, 1, [6, 13, 0], parents=parents)
    bench.core.step()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id) == (1, 13) and not bench.sink.failures
    bench.block(1, 3, [], 4)
    bench.run()
    assert isinstance(bench.sink.failures[(1, 1)], InternalError) and len(bench.sink.decisions) == 1


def test_cores_are_kept_awake_while_a_sequence_is_open_however_it_ends(bench):
    for n in (1, 2, 3):
        bench.open(n, [1, 2, n], deadline_s=100.0 if n == 1 else None)
    bench.open(3, [1, 2, 3])
    assert bench.fast_wake.num_held == 2, "3 was open already: it is closed"
    bench.core.expire(now_s=100.0)
    assert bench.fast_wake.num_held == 1
    bench.core.apply(CloseLink(1))
    bench.core.apply(Close((1, 2)))
    assert bench.fast_wake.num_held == 0


def test_a_deadline_closes_the_sequence_and_frees_its_pages(bench):
    span = Mock()
    bench.open(1, [1, 2, 3], deadline_s=100.0, span=span)
    bench.run()
    assert bench.core.expire(99.0) == 100.0
    assert bench.core.expire(100.0) is None
    assert isinstance(bench.sink.failures[(1, 1)], DeadlineExceededError)
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages
    span.set_attribute.assert_called_once_with(ERROR_TYPE, "DEADLINE_EXCEEDED")
    span.end.assert_called_once()


def test_a_broken_link_frees_only_its_own_sequences(bench):
    bench.open(1, [1, 2, 3])
    bench.run()
    bench.core.apply(CloseLink(2))
    assert len(bench.core._sequences) == 1
    bench.core.apply(CloseLink(1))
    assert not bench.core._sequences
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages


CERTAIN_OF = [SparseProbs([7, 8], [0.25, 0.75]), SparseProbs([9], [1.0])]


def judged(bench, modes):
    """(num_accepted, next_id) by sequence of the same sampled block in each of the modes."""
    for n, mode in modes.items():
        bench.open(n, [1, 2, 3], mode=mode, temperature=1.0, seed=11)
        bench.block(n, 3, [8, 9], draft_probs=CERTAIN_OF if mode is Mode.REJECTION else [])
    bench.run()
    return {d.key[1]: (d.num_accepted, d.next_id) for d in bench.sink.decisions}


def test_each_sequence_of_a_forward_has_its_own_mode(fake_runner_class):
    modes = {1: Mode.COUPLED, 2: Mode.REJECTION, 3: Mode.TYPICAL, 4: Mode.REJECTION}
    together = Bench(fake_runner_class())
    results = judged(together, modes)
    assert len(together.runner.forwards) == 1
    for n, mode in modes.items():
        assert judged(Bench(fake_runner_class()), {n: mode}) == {n: results[n]}
    assert results[2] == results[4]


def test_typical_accepts_what_is_likely_enough_and_rejection_what_the_draft_found_no_likelier(fake_runner_class):
    """After [1, 2, 3] the model gives its own token about 0.99."""
    bench = Bench(fake_runner_class())
    truth = bench.runner.complete([1, 2, 3], 3)
    for n, mode in enumerate((Mode.REJECTION, Mode.TYPICAL), start=1):
        bench.open(n, [1, 2, 3], mode=mode, temperature=1.0, seed=3)
        certain = [SparseProbs([token_id], [0.9]) for token_id in truth[:2]]
        bench.block(n, 3, truth[:2], draft_probs=certain if mode is Mode.REJECTION else [])
    bench.run()
    assert [decision.num_accepted for decision in bench.sink.decisions] == [2, 2]


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.TYPICAL])
def test_greedy_gives_the_target_s_tokens_in_every_mode(bench, mode):
    truth = bench.runner.complete([1, 2, 3], 3)
    bench.open(1, [1, 2, 3], mode=mode)
    bench.block(1, 3, [truth[0], (truth[1] + 1) % 90])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id) == (1, truth[1])


@pytest.mark.parametrize(
    ("mode", "fields", "field"),
    [
        (Mode.REJECTION, {"parents": [-1, 0]}, "block.parents"),
        (Mode.TYPICAL, {"draft_probs": CERTAIN_OF}, "block.draft_probs"),
        (Mode.COUPLED, {"draft_probs": CERTAIN_OF}, "block.draft_probs"),
    ],
)
def test_what_a_mode_does_not_know_is_refused(bench, mode, fields, field):
    bench.open(1, [1, 2, 3], mode=mode, temperature=1.0)
    bench.block(1, 3, [8, 9], **fields)
    error = bench.sink.failures[(1, 1)]
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.limit) == (field, f"must be absent in the mode {mode.name}")
