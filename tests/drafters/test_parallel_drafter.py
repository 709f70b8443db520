"""A PARD drafter takes one forward per draft after any commit, shares its model and respects all limits."""

import random

import pytest

from betoken.draft_worker.commands import Commit
from betoken.drafters.model import tokens as draft_tokens
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.staged.drafter import StagedDrafter
from betoken.engine.sampler import choose_tokens
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import Bench, request

MASK = 90


class ParallelBench(Bench):
    """Hosts a PARD model by itself and staged."""

    def drafters(self):
        model = ModelDrafter(self.runner, max_rows=16, max_prefill_tokens=6, pages=self.pages, mask_token_id=MASK)
        return {"model": model, "staged": StagedDrafter(model, NgramSettings())}

    def expected(self, ids, num_tokens):
        """The model's tokens after the ids and 0, 1, ... masks."""
        return [self.runner.next_id([*ids, *[MASK] * num_masks]) for num_masks in range(num_tokens)]

    def drafted(self):
        return {answer.key[1]: answer.drafted for answer in self.sink.answers}


@pytest.fixture
def bench(fake_runner_class):
    return ParallelBench(fake_runner_class())


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
def test_a_parallel_draft_takes_one_forward_whatever_its_length(bench, num_tokens):
    bench.open(1, [1, 2, 3])
    assert bench.draft(1, num_tokens=num_tokens) == {1: bench.expected([1, 2, 3], num_tokens)}
    assert bench.runner.forwards == [3 + num_tokens - 1]
    assert bench.drafted()[1].num_forwards == 1 and set(bench.drafted()[1].sources) == {"model"}
    emitted = [*bench.drafted()[1].draft_ids, 7]
    bench.core.apply(Commit((1, 1), 3, emitted))
    assert bench.draft(1, num_tokens=num_tokens) == {1: bench.expected([1, 2, 3, *emitted], num_tokens)}
    assert bench.runner.forwards[1:] == [len(emitted) + num_tokens - 1]


@pytest.mark.parametrize("seed", range(6))
def test_parallel_drafts_follow_any_commit_and_leak_no_page(fake_runner_class, seed):
    """With prompts in chunks, more tokens than a forward holds, few pages and an id that equals the mask token."""
    rng = random.Random(seed)
    bench = ParallelBench(fake_runner_class(num_pages=rng.choice([24, 60])))
    texts = {n: [rng.randrange(97) for _ in range(rng.randrange(1, 40))] for n in range(1, 5)}
    for n, ids in texts.items():
        bench.open(n, ids, rng.choice(["model", "staged"]), max_length=2000)
    num_drafts = 0
    for _ in range(12):
        drafts = bench.draft(*[n for n in texts if rng.random() < 0.8] or [1], num_tokens=(size := rng.randrange(1, 9)))
        num_drafts += sum(map(bool, drafts.values()))
        for n, draft in drafts.items():
            assert draft in ([], bench.expected(texts[n], size)), (seed, n)
        for n, ids in texts.items():
            emitted = [*drafts.get(n, [])[: rng.randrange(9)], rng.choice([MASK, rng.randrange(97)])]
            bench.core.apply(Commit((1, n), len(ids), emitted))
            ids += emitted
    assert num_drafts > 8
    bench.core.apply(CloseLink(1))
    assert bench.runner.page_table.num_free == bench.runner.page_table.num_pages and not bench.sink.failures


def test_masks_are_never_found_in_the_prefix_cache(bench):
    prompt = list(range(10))
    bench.open(1, prompt)
    bench.draft(1, num_tokens=8)
    bench.core.apply(Commit((1, 1), 10, [80]))
    bench.open(2, [*prompt, MASK, MASK, MASK, MASK, 5])
    num_before = len(bench.runner.forwards)
    bench.draft(2, num_tokens=1)
    assert sum(bench.runner.forwards[num_before:]) == 15 - 8


def test_a_parallel_draft_ends_at_the_context_and_at_the_rows_of_a_forward(fake_runner_class):
    bench = ParallelBench(fake_runner_class(max_context=20))
    for n, length in ((1, 15), (2, 20), (3, 1)):
        bench.open(n, list(range(length)))
    drafts = bench.draft(1, 2, 3, num_tokens=18)
    assert drafts == {1: bench.expected(list(range(15)), 5), 2: [], 3: bench.expected([0], 16)}


def test_nothing_follows_an_end_id_in_a_parallel_draft(bench):
    expected = bench.expected([1, 2, 3], 8)
    bench.open(1, [1, 2, 3])
    sequence = bench.core._sequences[(1, 1)].sequence
    object.__setattr__(sequence.params, "ignore_eos", False)
    object.__setattr__(sequence.params, "eos_token_ids", (expected[3],))
    assert bench.draft(1, num_tokens=8) == {1: expected[: expected.index(expected[3]) + 1]}


class AheadBench(ParallelBench):
    """Drafts ahead for three outcomes; the drafts of the last request, and those pushed after it, by their keys."""

    def request(self, num_tokens, is_idle_after=True):
        num_before = len(self.runner.forwards)
        self.core.apply(request(self.core, 1, num_tokens, 0, num_outcomes=3))
        self.sink.answers.clear()
        while self.core.has_work and (is_idle_after or not self.sink.answers):
            self.core.step()
            self.core.check_integrity()
            for kv in self.core.host._drafters["model"]._caches.values():
                assert self.runner.held_ids(kv.page_ids, len(kv.kv_ids)) == kv.kv_ids
        answer, *pushed = self.sink.answers
        assert not answer.is_ahead and not self.sink.failures
        self.pushed = {one.request.key: one.drafted.draft_ids for one in pushed}
        return answer.drafted, self.runner.forwards[num_before:]


@pytest.fixture
def ahead_bench(unsure_runner_class):
    return AheadBench(unsure_runner_class())


def test_one_forward_of_a_parallel_model_drafts_for_all_outcomes(ahead_bench):
    bench, ids = ahead_bench, [1, 2, 3]
    bench.open(1, ids)
    drafted, forwards = bench.request(4)
    assert drafted.num_ahead_ids is None and forwards == [3 + 3, 4, 3 * 4]
    for _ in range(6):
        assert len(bench.pushed) == 3
        for (base_length, next_id), draft in bench.pushed.items():
            text = [*ids, *drafted.draft_ids[: base_length - len(ids) - 1], next_id]
            assert draft == bench.expected(text, 4)
        base_length, next_id = list(bench.pushed)[-1]
        emitted = [*drafted.draft_ids[: base_length - len(ids) - 1], next_id]
        expected = bench.pushed[base_length, next_id]
        bench.core.apply(Commit((1, 1), len(ids), emitted))
        ids += emitted
        drafted, forwards = bench.request(4)
        assert (drafted.draft_ids, drafted.num_ahead_ids, drafted.num_ahead_tokens) == (expected, 4, 12)
        assert forwards == [4, 3 * 4]  # of the drafts ahead


@pytest.mark.parametrize(("num_tokens", "num_ahead"), [(2, 2), (4, 4), (6, 0)])
def test_a_longer_parallel_draft_than_the_one_made_ahead_is_drafted_anew(ahead_bench, num_tokens, num_ahead):
    bench = ahead_bench
    bench.open(1, [1, 2, 3])
    drafted, _ = bench.request(4)
    base_length, next_id = next(iter(bench.pushed))
    emitted = [*drafted.draft_ids[: base_length - 4], next_id]
    bench.core.apply(Commit((1, 1), 3, emitted))
    drafted, forwards = bench.request(num_tokens, is_idle_after=False)
    assert drafted.draft_ids == bench.expected([1, 2, 3, *emitted], num_tokens)
    assert drafted.num_ahead_ids == num_ahead and len(forwards) == (not num_ahead)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_committed_ids_that_cut_a_parallel_draft_leave_nothing_of_it(ahead_bench, num_steps):
    """Its later tokens were drafted without knowing the ones before."""
    bench = ahead_bench
    bench.open(1, [1, 2, 3])
    drafted, _ = bench.request(4, is_idle_after=False)
    for _ in range(num_steps):
        bench.core.step()
    for length, token_id in enumerate(drafted.draft_ids[:2], start=3):
        bench.core.apply(Commit((1, 1), length, [token_id]))
    again, _ = bench.request(4)
    assert again.num_ahead_ids == 0 and again.draft_ids == bench.expected([1, 2, 3, *drafted.draft_ids[:2]], 4)


@pytest.mark.parametrize("settings", [{"max_branches": "2"}, {}])
def test_trees_and_staged_drafts_of_a_parallel_model_are_not_made_ahead(bench, settings):
    bench.open(1, [1, 2, 3], "model" if settings else "staged", **settings)
    bench.core.apply(request(bench.core, 1, 4, 0, takes_trees=True, num_outcomes=3))
    while bench.core.has_work:
        bench.core.step()
    assert bench.drafted()[1].num_ahead_ids is None and len(bench.runner.forwards) == 1


@pytest.mark.parametrize("is_forward", [True, False])
def test_a_fault_costs_a_parallel_draft_and_no_later_one(bench, monkeypatch, is_forward):
    faults = [RuntimeError("no memory for it")]

    def choose(logits, groups):
        if faults:
            raise faults.pop()
        return choose_tokens(logits, groups)

    bench.open(1, [1, 2, 3], "staged")
    bench.open(2, [4, 5, 6], "model")
    if is_forward:
        bench.runner.fail_next = True
    else:
        monkeypatch.setattr(draft_tokens, "choose_tokens", choose)
    assert sorted(map(bool, bench.draft(1, 2).values())) == [False, True]
    assert bench.draft(1, 2) == {1: bench.expected([1, 2, 3], 4), 2: bench.expected([4, 5, 6], 4)}
