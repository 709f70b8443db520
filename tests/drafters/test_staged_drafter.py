"""Staged drafts are the small model's own, in fewer forwards, and say which tokens an n-gram guessed."""

import random

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.commands import Commit
from betoken.draft_worker.core import DraftCore
from betoken.drafters.model import tokens as draft_tokens
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.ngram.suffix_automaton import SuffixAutomaton
from betoken.drafters.staged.drafter import StagedDrafter
from betoken.engine.sampler import choose_tokens
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import Bench, request


class StagedBench(Bench):
    """Hosts the model by itself and staged, both over one model drafter."""

    def drafters(self):
        model = ModelDrafter(self.runner, max_rows=16, max_prefill_tokens=6)
        return {"model": model, "staged": StagedDrafter(model, NgramSettings())}

    def sources(self):
        return {answer.key[1]: answer.drafted.sources for answer in self.sink.answers}


@pytest.fixture
def bench(fake_runner_class):
    return StagedBench(fake_runner_class())


def test_right_ngram_guesses_save_forwards_and_are_named_as_sources(bench):
    text = bench.runner.complete([1, 2, 3], 20)
    prompt = [1, 2, 3, *text, 1, 2, 3]  # said once already
    bench.open(1, prompt, "staged")
    assert bench.draft(1, num_tokens=6) == {1: text[:6]}
    assert bench.sources()[1] == ["ngram"] * 5 + ["model"]
    bench.core.apply(Commit((1, 1), len(prompt), text[:7]))
    bench.runner.forwards.clear()
    assert bench.draft(1, num_tokens=6) == {1: text[7:13]}
    assert len(bench.runner.forwards) == 1
    assert bench.sink.answers[0].drafted.num_forwards == 1


def test_wrong_ngram_guesses_change_no_staged_draft(bench):
    prompt = [1, 2, 3, 90, 91, 92, 1, 2, 3]
    bench.open(1, prompt, "staged")
    assert bench.draft(1, num_tokens=5) == {1: bench.runner.complete(prompt, 5)}
    assert bench.sources()[1][0] == "model"


def test_settings_of_the_staged_drafter_are_those_of_ngrams(bench):
    bench.open(1, [1, 2], "staged", min_ngram="0")
    bench.open(2, [1, 2], "staged", min_ngram="3")
    assert isinstance(bench.sink.failures.pop((1, 1)), InvalidArgumentError)
    assert bench.draft(2) == {2: bench.runner.complete([1, 2], 4)}


@pytest.mark.parametrize("seed", range(6))
def test_staged_drafts_are_the_models_after_any_commit_and_leak_no_page(fake_runner_class, seed):
    rng = random.Random(seed)
    runner = fake_runner_class(num_pages=40)
    bench = StagedBench(runner)
    texts = {}
    num_guessed = 0
    for n in range(1, 5):
        phrase = [n, n + 1, n + 2]
        texts[n] = [*phrase, *runner.complete(phrase, rng.randrange(5, 30)), *phrase]
        bench.open(n, texts[n], "model" if n == 4 else "staged", max_length=2000)
    for _ in range(12):
        asked = [n for n in texts if rng.random() < 0.8] or [1]
        drafts = bench.draft(*asked, num_tokens=rng.randrange(1, 8))
        num_guessed += sum(source == "ngram" for of in bench.sources().values() for source in of)
        for n in asked:
            assert drafts[n] == runner.complete(texts[n], len(drafts[n])), (seed, n)
        for n, text in texts.items():
            kept = drafts.get(n, [])[: rng.randrange(8)]
            target_id = runner.next_id(text + kept)
            emitted = rng.choice([[*kept, target_id], [*kept, target_id], [*kept, rng.randrange(90)], text[:3]])
            bench.core.apply(Commit((1, n), len(text), emitted))
            text += emitted
    assert num_guessed
    bench.core.apply(CloseLink(1))
    assert runner.page_table.num_free == runner.page_table.num_pages
    assert not bench.sink.failures


def test_a_failed_forward_costs_staged_and_model_drafts_one_round(bench):
    bench.open(1, [1, 2, 3], "staged")
    bench.open(2, [4, 5, 6], "model")
    bench.draft(1, 2)
    bench.runner.fail_next = True
    drafts = bench.draft(1, 2)
    assert [] in drafts.values()
    assert bench.draft(1, 2) == {1: bench.runner.complete([1, 2, 3], 4), 2: bench.runner.complete([4, 5, 6], 4)}


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("num_before", range(6))
def test_a_failed_forward_leaves_no_tree_with_unwritten_rows(bench, monkeypatch, num_before, is_forward):
    faults = [None] * num_before + [RuntimeError("no memory for it")]

    def failing(call):
        def wrapped(*arguments):
            if faults and (fault := faults.pop(0)):
                raise fault
            return call(*arguments)

        return wrapped

    drafters = dict(reversed(bench.drafters().items()))  # a forward fails in staged's step, with a tree of model in it
    bench.core = DraftCore(drafters, [bench.runner.page_table], bench.sink, 8)
    bench.open(1, [1, 2, 3], "staged")
    bench.open(2, [4, 5, 6], "model", max_branches="2")
    for n in (1, 2):
        bench.core.apply(request(bench.core, n, 6, 0, takes_trees=True))
    where, name = (bench.runner, "forward") if is_forward else (draft_tokens, "choose_tokens")
    monkeypatch.setattr(where, name, failing(getattr(where, name)))
    drafts = bench.draft()  # looks at every id whose KV counts as written
    assert sorted(map(bool, drafts.values())) == [False, True]
    if drafts[2]:
        assert drafts[2] == bench.runner.complete([4, 5, 6], 6)


def test_a_failed_sampling_costs_one_round_and_leaves_no_pending_work(bench, monkeypatch):
    bench.open(1, [1, 2, 3], "staged")
    bench.open(2, [4, 5, 6], "model")
    bench.draft(1, 2)
    faults = [RuntimeError("no memory for it")]

    def choose(logits, groups):
        if faults:
            raise faults.pop()
        return choose_tokens(logits, groups)

    monkeypatch.setattr(draft_tokens, "choose_tokens", choose)
    drafts = bench.draft(1, 2)
    assert not bench.core.has_work
    assert drafts == {1: bench.runner.complete([1, 2, 3], 4), 2: []}
    assert bench.draft(1, 2) == {1: bench.runner.complete([1, 2, 3], 4), 2: bench.runner.complete([4, 5, 6], 4)}


def test_reading_on_in_the_automaton_finds_the_matches_of_appending():
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        more = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        automaton = SuffixAutomaton()
        automaton.extend(ids)
        match = automaton.match()
        for token_id in more:
            match = automaton.read(match, token_id)
        state, length = match
        whole = ids + more
        followed = [n for n in range(1, len(whole)) if any(ids[i : i + n] == whole[-n:] for i in range(len(ids) - n))]
        assert length == max(followed, default=0)
        if length:
            position = automaton.next_position(state)
            assert position < len(ids) and ids[position - length : position] == whole[-length:]
