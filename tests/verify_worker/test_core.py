"""The verify core commits exactly the target's tokens, whatever blocks, batches and page shortages it meets."""

import random
from unittest.mock import Mock

import pytest

from betoken.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from betoken.common.names import ERROR_TYPE
from betoken.engine.errors import RankLostError
from betoken.rpc.link import sequence_table
from betoken.rpc.link.commands import Close, CloseLink
from tests.verify_worker.harness import Bench


def test_kv_length_is_committed_length_less_one_after_every_result(bench):
    bench.open(1, [1, 2, 3, 4, 5])
    bench.block(1, 5, [9, 9, 9])
    bench.run()
    (seq,) = bench.core._sequences.values()
    assert seq.kv_length == seq.committed_length - 1 == 5


def test_any_drafts_give_the_targets_tokens(bench):
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


def test_opens_and_closes_report_the_load_even_without_a_forward(fake_runner_class):
    """Without it a router that found this worker silent would not learn that it is at work again."""
    bench = Bench(fake_runner_class())
    for act, num_open in ((lambda: bench.open(1, [1, 2, 3]), 1), (lambda: bench.core.apply(Close((1, 1))), 0)):
        bench.sink.load = None
        act()
        assert bench.sink.load.num_running + bench.sink.load.num_waiting == num_open


@pytest.mark.parametrize("max_sequences", [1, 8])
def test_a_sequence_opened_twice_is_closed_as_its_error_says(fake_runner_class, max_sequences):
    bench = Bench(fake_runner_class(), max_sequences=max_sequences)
    for _ in range(2):
        bench.open(1, [1, 2, 3])
    assert isinstance(bench.sink.failures[(1, 1)], FailedPreconditionError)
    assert bench.sink.load.num_running == 0 and not bench.core._sequences


def test_blocks_that_wait_long_are_reported_as_pending_until_their_result(fake_runner_class, monkeypatch):
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


def test_a_short_wait_of_a_block_is_not_reported_as_pending(bench, monkeypatch):
    monkeypatch.setattr(sequence_table, "PENDING_INTERVAL_S", 60.0)
    bench.open(1, [1, 2, 3] * 13)
    bench.block(1, 39, [], num_plain_steps=5)
    bench.run()
    assert bench.sink.decisions and not bench.sink.pendings


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


def test_every_span_of_a_sequence_ends_including_rejected_ones(fake_runner_class):
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


def test_a_rank_that_is_lost_in_a_forward_ends_the_worker(bench, monkeypatch):
    bench.open(1, [1])
    bench.block(1, 1, [], 2)
    monkeypatch.setattr(bench.runner, "forward", Mock(side_effect=RankLostError("rank 1 was ended by SIGKILL")))
    with pytest.raises(RankLostError, match="rank 1"):
        bench.core.step()
    assert not bench.sink.failures


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
