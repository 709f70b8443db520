"""Fused drafting settles per sequence on the source that brings most tokens per second, and goes on trying others."""

import random

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.commands import Commit
from betoken.drafters.drafter import Drafted
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.staged.drafter import StagedDrafter
from betoken.rpc.link.commands import Close, CloseLink
from tests.draft_worker.harness import Bench
from tests.drafters.harness import Clocked, NamedDrafter


@pytest.fixture
def bench(fake_runner_class):
    return Clocked(fake_runner_class())


def test_the_better_source_is_found_and_the_other_seldom_tried(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    chosen = [bench.round(1, {1: 1, 2: 4}) for _ in range(300)]
    assert chosen[20:].count(2) / 280 > 0.96
    assert 1 in chosen[200:]


def test_a_source_that_becomes_better_is_noticed(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(100):
        bench.round(1, {1: 1, 2: 4})
    chosen = [bench.round(1, {1: 8, 2: 1}) for _ in range(200)]
    assert chosen[100:].count(1) / 100 > 0.9


def test_a_source_that_becomes_better_is_noticed_by_answers_too_short_for_a_trial(bench):
    def rounds(first, last, rates):
        for n in range(first, last):
            bench.open(n, [5], "fused", max_length=10_000)
            yield from [bench.round(n, rates) for _ in range(10)]
            bench.core.apply(Close((1, n)))

    assert 2 not in list(rounds(0, 20, {1: 4, 2: 1}))[100:]
    assert list(rounds(20, 420, {1: 4, 2: 40}))[-100:].count(2) > 90


def test_a_delayed_round_does_not_count_for_its_source(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        bench.round(1, {1: 1, 2: 4})
    assert bench.draft(1) == {1: [2]}
    bench.now_ns += 10_000_000_000_000  # the verify worker was away, or the client read nothing
    bench.core.apply(Commit((1, 1), len(bench.core._sequences[(1, 1)].sequence.ids), [9] * 4))
    chosen = []
    for n in range(2, 12):
        bench.open(n, [5], "fused", max_length=10_000)
        chosen += [bench.round(n, {1: 1, 2: 4}) for _ in range(20)]
        bench.core.apply(Close((1, n)))
    assert chosen.count(2) / 200 > 0.9


def test_decode_steps_without_drafts_are_not_credited_to_the_last_source(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        bench.round(1, {1: 1, 2: 4})
    while bench.round(1, {1: 1, 2: 4}) == 2:
        pass
    assert bench.draft(1) == {1: [1]}, "the second round of a trial"
    bench.now_ns += 1_000_000_000_000
    bench.core.apply(Commit((1, 1), len(bench.core._sequences[(1, 1)].sequence.ids), [9] * 1000))
    bench.open(2, [5], "fused", max_length=10_000)
    assert [bench.round(2, {1: 1, 2: 4}) for _ in range(20)].count(2) > 17


def test_a_new_sequence_begins_with_the_best_source_of_others(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        bench.round(1, {1: 1, 2: 4})
    bench.open(2, [5], "fused", max_length=10_000)
    assert [bench.round(2, {1: 1, 2: 4}) for _ in range(6)] == [2] * 6
    chosen = [(bench.round(1, {1: 1, 2: 4}), bench.round(2, {1: 6, 2: 1})) for _ in range(200)]
    assert sum(first == 2 for first, _ in chosen[100:]) > 90
    assert sum(second == 1 for _, second in chosen[100:]) > 90


def test_tokens_committed_while_a_draft_was_late_are_not_credited_to_its_source(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    assert bench.draft(1, num_tokens=4) == {1: [1]}
    bench.now_ns += 1_000_000_000
    bench.core.apply(Commit((1, 1), 1, [9] * 500))
    chosen = [bench.round(1, {1: 1, 2: 4}) for _ in range(100)]
    assert chosen[20:].count(2) / 80 > 0.9


def test_a_source_that_raises_costs_one_round(bench):
    bench.open(1, [5], "fused")
    bench.slow.fails = bench.quick.fails = True
    assert bench.draft(1) == {1: []}
    bench.slow.fails = bench.quick.fails = False
    assert bench.draft(1)[1] in ([1], [2])
    assert not bench.sink.failures


def test_a_source_that_always_raises_is_given_up(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    bench.slow.fails = True
    drafts = []
    for _ in range(120):
        drafts.append(bench.draft(1)[1])
        bench.now_ns += 1_000_000_000
        entry = bench.core._sequences[(1, 1)].sequence
        bench.core.apply(Commit((1, 1), len(entry.ids), [9]))
    assert drafts[-20:].count([2]) >= 18
    assert not bench.sink.failures


def test_the_best_source_may_fail_and_come_back(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        assert bench.round(1, {1: 1, 2: 4})
    bench.quick.fails = True
    drafts = []
    for _ in range(100):
        drafts.append(bench.draft(1)[1])
        bench.now_ns += 1_000_000_000
        entry = bench.core._sequences[(1, 1)].sequence
        bench.core.apply(Commit((1, 1), len(entry.ids), [9]))
    assert drafts[20:].count([1]) >= 78
    bench.quick.fails = False
    chosen = [bench.round(1, {1: 1, 2: 4}) for _ in range(400)]
    assert chosen[-100:].count(2) > 90
    assert not bench.sink.failures


def test_answers_that_end_together_are_not_a_fault_of_their_source(bench):
    bench.core._sequences._max_sequences = 100
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        bench.round(1, {1: 1, 2: 4})
    for n in range(2, 42):
        bench.open(n, [5], "fused")
        assert bench.draft(n)[n] == [2]
    for n in range(2, 42):
        bench.core.apply(Close((1, n)))  # in mid-round: the router tells nobody of an answer's last tokens
    bench.open(50, [5], "fused", max_length=10_000)
    assert [bench.round(50, {1: 1, 2: 4}) for _ in range(6)] == [2] * 6


@pytest.mark.parametrize("was_timed", [False, True])
def test_a_source_whose_drafts_are_given_up_every_time_is_given_up(bench, was_timed):
    if was_timed:
        bench.open(1, [5], "fused", max_length=10_000)
        for _ in range(60):
            bench.round(1, {1: 1, 2: 4})
    (bench.quick if was_timed else bench.slow).hangs = True  # the best, or the first to be tried
    answered = []
    for n in range(2, 42):
        bench.open(n, [5], "fused")
        answered.append(bool(bench.draft(n)))
        bench.now_ns += 10_000_000_000
        if answered[-1]:
            bench.core.apply(Commit((1, n), 1, [9]))
        bench.core.apply(Close((1, n)))
    assert answered[-20:] == [True] * 20
    assert not bench.sink.failures


def test_drafts_that_end_with_their_link_are_not_a_fault_of_their_source(bench):
    bench.core._sequences._max_sequences = 100
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        bench.round(1, {1: 1, 2: 4})
    bench.quick.hangs = True
    for n in range(2, 42):
        bench.open(n, [5], "fused")
    assert bench.draft(*range(2, 42)) == {}
    bench.now_ns += 1_000_000_000
    bench.core.apply(CloseLink(1))
    bench.quick.hangs = False
    bench.open(50, [5], "fused", max_length=10_000)
    assert [bench.round(50, {1: 1, 2: 4}) for _ in range(6)] == [2] * 6


class Unruly(ImmediateDrafter):
    """Raises where told to."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def commit(self, sequence, ids):
        if self.where == "commit":
            raise RuntimeError("out of order")

    def close(self, sequence):
        super().close(sequence)
        if self.where == "close":
            raise RuntimeError("out of order")

    def propose(self, sequence, num_tokens):
        return Drafted(sequence, [1])


def test_a_source_that_cannot_close_keeps_no_page_of_another(fake_runner_class):
    bench = Bench(fake_runner_class())
    model = ModelDrafter(bench.runner, max_rows=16, max_prefill_tokens=6)
    sources = {"unruly": Unruly("close"), "model": model}
    bench.core.host = DrafterHost({**sources, "fused": FusedDrafter(sources)}, bench.core)
    bench.open(1, range(1, 20), "fused")
    for _ in range(4):
        bench.draft(1)
        entry = bench.core._sequences[(1, 1)].sequence
        bench.core.apply(Commit((1, 1), len(entry.ids), [5]))
    assert bench.runner.page_table.num_free < bench.runner.page_table.num_pages, "the model has drafted"
    bench.core.apply(Close((1, 1)))
    assert bench.runner.page_table.num_free == bench.runner.page_table.num_pages
    assert not list(model.page_lists())


def test_a_source_that_cannot_commit_does_not_count_against_the_drafting_source(bench):
    sources = {"unruly": Unruly("commit"), "quick": bench.quick}
    bench.core.host = DrafterHost({**sources, "fused": FusedDrafter(sources, lambda: bench.now_ns)}, bench.core)
    bench.open(1, [5], "fused", max_length=10_000)
    chosen = [bench.round(1, {1: 1, 2: 4}) for _ in range(100)]
    assert chosen[20:].count(2) > 75
    assert not bench.sink.failures


class CatchingUp(Clocked):
    """The quick source takes nine times as long in a round after others drafted 36 tokens."""

    def round(self, sequence_id, rates):
        quick_before = self.quick.num_rounds
        number = super().round(sequence_id, rates)
        is_first = self.quick.num_rounds > quick_before and self.last != 2
        self.last = number
        return number, is_first

    def drafters(self):
        self.last = 0
        made = super().drafters()
        drafter = self

        class Late(NamedDrafter):
            def propose(self, sequence, num_tokens):
                if drafter.last != 2:
                    drafter.now_ns += 8_000_000_000
                return super().propose(sequence, num_tokens)

        self.quick = Late(2)
        sources = {"slow": self.slow, "quick": self.quick}
        return {**made, **sources, "fused": FusedDrafter(sources, lambda: self.now_ns)}


def test_catching_up_with_drafts_of_others_does_not_count_against_a_source(fake_runner_class):
    bench = CatchingUp(fake_runner_class())
    bench.open(1, [5], "fused", max_length=10_000)
    chosen = [bench.round(1, {1: 36, 2: 120})[0] for _ in range(60)]
    assert chosen[20:].count(2) / 40 > 0.6, "120 tokens a second against 36, once it has caught up"
    bench.open(2, [5], "fused", max_length=10_000)
    assert [bench.round(2, {1: 36, 2: 120})[0] for _ in range(6)] == [2] * 6


def test_a_source_with_a_long_first_round_is_used_only_if_it_pays_off(fake_runner_class):
    bench = CatchingUp(fake_runner_class())
    bench.open(1, [5], "fused", max_length=10_000)
    assert [bench.round(1, {1: 36, 2: 48})[0] for _ in range(60)][20:].count(2) / 40 > 0.6
    bench.open(2, [5], "fused", max_length=10_000)
    chosen = [bench.round(2, {1: 36, 2: 48})[0] for _ in range(5)]
    assert chosen == [1] * 5, "8 seconds are not soon saved"


class Counting(NamedDrafter):
    """Counts what it is told of its sequences."""

    def __init__(self, number):
        super().__init__(number)
        self.num_calls = 0

    def open(self, sequence):
        self.num_calls += 1
        super().open(sequence)

    def commit(self, sequence, ids):
        self.num_calls += 1


def test_a_source_opens_a_sequence_with_its_first_request(fake_runner_class):
    bench = Clocked(fake_runner_class())
    first, second = Counting(1), Counting(2)
    sources = {"first": first, "second": second}
    fused = FusedDrafter(sources, lambda: bench.now_ns)
    bench.core.host = DrafterHost({**sources, "fused": fused}, bench.core)
    bench.open(1, [5], "fused", max_length=10_000)
    assert first.num_calls == second.num_calls == 0
    assert [bench.round(1, {1: 4, 2: 1}) for _ in range(2)] == [1, 1]
    assert (first.num_calls, second.num_calls) == (3, 0)
    bench.core.apply(Close((1, 1)))
    assert not bench.sink.failures


def test_with_all_drafters_hosted_a_sequence_costs_no_forward_before_it_drafts(fake_runner_class):
    bench = Real(fake_runner_class())
    for n in range(1, 5):
        bench.open(n, [n] * 20, "fused")
    assert not bench.core.has_work and not bench.runner.forwards
    bench.draft(1, num_tokens=1)
    assert sum(bench.runner.forwards) == 20, "one source's prefill"


def test_the_first_source_drafts_if_drafts_affect_the_output(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    bench.core._sequences[(1, 1)].sequence.draft_affects_output = True
    assert {bench.round(1, {1: 1, 2: 4}) for _ in range(100)} == {1}


def test_settings_of_the_fused_drafter_are_rejected(bench):
    bench.open(1, [5], "fused", min_ngram="2")
    assert isinstance(bench.sink.failures[(1, 1)], InvalidArgumentError)


class Real(Bench):
    def drafters(self):
        model = ModelDrafter(self.runner, max_rows=16, max_prefill_tokens=6)
        staged = StagedDrafter(model, NgramSettings())
        sources = {"model": model, "ngram": NgramDrafter(), "staged": staged}
        return {**sources, "fused": FusedDrafter(sources)}


@pytest.mark.parametrize("seed", range(4))
def test_over_real_drafters_no_commit_leaks_a_page_or_confuses_a_source(fake_runner_class, seed):
    rng = random.Random(seed)
    runner = fake_runner_class(num_pages=40)
    bench = Real(runner)
    texts = {n: [n, n + 1, *runner.complete([n, n + 1], 20), n, n + 1] for n in range(1, 5)}
    for n, text in texts.items():
        bench.open(n, text, "fused", max_length=2000)
    seen = set()
    for _ in range(25):
        drafts = bench.draft(*texts, num_tokens=rng.randrange(1, 7))
        for answer in bench.sink.answers:
            seen |= set(answer.drafted.sources)
            if "model" in answer.drafted.sources:
                text = texts[answer.key[1]]
                assert answer.drafted.draft_ids == runner.complete(text, len(answer.drafted.draft_ids))
        for n, text in texts.items():
            kept = drafts[n][: rng.randrange(6)]
            emitted = [*kept, runner.next_id(text + kept)]
            bench.core.apply(Commit((1, n), len(text), emitted))
            text += emitted
    assert seen == {"model", "ngram"}
    bench.core.apply(Close((1, 1)))
    bench.core.apply(CloseLink(1))
    assert runner.page_table.num_free == runner.page_table.num_pages
    assert not bench.sink.failures
