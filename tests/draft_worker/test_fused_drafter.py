"""Fused drafting settles per sequence on the source that brings most tokens per second, and goes on trying others."""

import random

import pytest

from foretoken.draft_worker.drafter import Drafted
from foretoken.draft_worker.fused_drafter import FusedDrafter
from foretoken.draft_worker.immediate_drafter import ImmediateDrafter
from foretoken.draft_worker.model_drafter import ModelDrafter
from foretoken.draft_worker.ngram_drafter import NgramDrafter, NgramSettings
from foretoken.draft_worker.staged_drafter import StagedDrafter
from foretoken.rpc.errors import InvalidArgumentError
from foretoken.v1.types_pb2 import DRAFT_SOURCE_MODEL, DRAFT_SOURCE_NGRAM
from tests.draft_worker.test_core import Bench


class NamedDrafter(ImmediateDrafter):
    """Drafts its own number, and raises where told to."""

    def __init__(self, number):
        super().__init__()
        self.number, self.num_rounds, self.fails = number, 0, False

    def step(self):
        if self.fails:
            raise RuntimeError("out of order")
        return super().step()

    def propose(self, sequence, num_tokens):
        self.num_rounds += 1
        return Drafted(sequence, [self.number])


class Clocked(Bench):
    """Two sources behind a clock that says how long a round with each takes."""

    def drafters(self):
        self.now_ns = 0
        self.slow, self.quick = NamedDrafter(1), NamedDrafter(2)
        sources = {"slow": self.slow, "quick": self.quick}
        return {**sources, "fused": FusedDrafter(sources, lambda: self.now_ns)}

    def round(self, sequence_id, rates):
        """One round: the source's number says how many tokens it brings in a second."""
        (number,) = self.draft(sequence_id)[sequence_id]
        self.now_ns += 1_000_000_000
        entry = self.core._sequences[(1, sequence_id)].sequence
        self.core.commit((1, sequence_id), len(entry.ids), [9] * rates[number])
        return number


@pytest.fixture
def bench(fake_runner_class):
    return Clocked(fake_runner_class())


def test_the_better_source_is_found_and_the_other_seldom_tried(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    chosen = [bench.round(1, {1: 1, 2: 4}) for _ in range(300)]
    assert chosen[20:].count(2) / 280 > 0.96
    assert 1 in chosen[200:]


def test_a_change_of_fortune_is_noticed(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(100):
        bench.round(1, {1: 1, 2: 4})
    chosen = [bench.round(1, {1: 8, 2: 1}) for _ in range(200)]
    assert chosen[100:].count(1) / 100 > 0.9


def test_sequences_differ_and_a_new_one_begins_with_what_others_taught(bench):
    bench.open(1, [5], "fused", max_length=10_000)
    for _ in range(60):
        bench.round(1, {1: 1, 2: 4})
    bench.open(2, [5], "fused", max_length=10_000)
    assert [bench.round(2, {1: 1, 2: 4}) for _ in range(6)] == [2] * 6
    chosen = [(bench.round(1, {1: 1, 2: 4}), bench.round(2, {1: 6, 2: 1})) for _ in range(200)]
    assert sum(first == 2 for first, _ in chosen[100:]) > 90
    assert sum(second == 1 for _, second in chosen[100:]) > 90


def test_a_source_that_raises_costs_one_round(bench):
    bench.open(1, [5], "fused")
    bench.slow.fails = bench.quick.fails = True
    assert bench.draft(1) == {1: []}
    bench.slow.fails = bench.quick.fails = False
    assert bench.draft(1)[1] in ([1], [2])
    assert not bench.sink.failures


def test_settings_are_refused(bench):
    bench.open(1, [5], "fused", min_ngram="2")
    assert isinstance(bench.sink.failures[(1, 1)], InvalidArgumentError)


class Real(Bench):
    def drafters(self):
        model = ModelDrafter(self.runner, max_rows=16, max_prefill_rows=6)
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
            if DRAFT_SOURCE_MODEL in answer.drafted.sources:
                text = texts[answer.key[1]]
                assert answer.drafted.draft_ids == runner.complete(text, len(answer.drafted.draft_ids))
        for n, text in texts.items():
            kept = drafts[n][: rng.randrange(6)]
            emitted = [*kept, runner.next_id(text + kept)]
            bench.core.commit((1, n), len(text), emitted)
            text += emitted
    assert seen == {DRAFT_SOURCE_MODEL, DRAFT_SOURCE_NGRAM}
    bench.core.close((1, 1))
    bench.core.close_link(1)
    assert runner.page_table.num_free == runner.page_table.num_pages
    assert not bench.sink.failures
