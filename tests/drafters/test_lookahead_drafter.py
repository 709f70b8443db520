"""The lookahead drafter over a draft core: answers at once, iterates between results, keeps its pages and bounds."""

import random
import time

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.commands import Commit, Open
from betoken.draft_worker.core import DraftCore
from betoken.drafters.lookahead import drafter
from betoken.drafters.lookahead.drafter import LookaheadDrafter
from betoken.drafters.lookahead.settings import LookaheadSettings
from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.sampling import SamplingParams
from betoken.rpc.link.commands import Close, CloseLink
from tests.draft_worker.harness import Bench, request

MAX_ROWS = 48
SMALL = LookaheadSettings(window=4, ngram_size=4, guesses=3)
ROWS = 12


class LookaheadBench(Bench):
    """Hosts lookahead beside a model drafter, both over one runner and its pages."""

    def drafters(self):
        model = ModelDrafter(self.runner, MAX_ROWS, 6, pages=self.pages)
        return {"lookahead": LookaheadDrafter(self.runner, MAX_ROWS, 6, SMALL, self.pages), "model": model}

    def open(self, sequence_id, prompt_ids, drafter="lookahead", **options):
        super().open(sequence_id, prompt_ids, drafter, **options)

    def blocks(self, *sequence_ids, num_tokens=16, takes_trees=True):
        """Draft blocks by sequence id; steps run on until nothing is left to do."""
        self.sink.answers.clear()
        for sequence_id in sequence_ids:
            self.core.apply(request(self.core, sequence_id, num_tokens, time.perf_counter_ns(), takes_trees))
        for _ in range(500):
            if not self.core.has_work:
                break
            self.core.step()
            self.core.check_integrity()
        assert not self.core.has_work
        return {answer.key[1]: answer.drafted for answer in self.sink.answers}


@pytest.fixture
def bench(fake_runner_class):
    return LookaheadBench(fake_runner_class(num_pages=128))


def paths(drafted):
    """Every path from the last committed token to a leaf."""
    parents = drafted.parents or list(range(-1, len(drafted.draft_ids) - 1))
    found = []
    for node in sorted(set(range(len(parents))) - set(parents)):
        path = []
        while node >= 0:
            path.insert(0, drafted.draft_ids[node])
            node = parents[node]
        found.append(path)
    return found


def test_a_request_is_answered_before_the_prompt_is_prefilled(bench):
    bench.open(1, list(range(40)))
    bench.core.apply(request(bench.core, 1, 8, 0, True))
    bench.core.step()
    assert [answer.drafted.draft_ids for answer in bench.sink.answers] == [[]]
    assert bench.runner.forwards == []
    assert bench.core.has_work


def test_steps_without_a_commit_are_jacobi_iteration(bench):
    """After N - 1 steps the n-gram of the last committed token is what the model says."""
    bench.open(1, [1, 2, 3], steps="3")
    bench.blocks(1)
    assert paths(bench.blocks(1)[1])[0] == bench.runner.complete([1, 2, 3], 3)


def test_drafts_of_a_replica_are_the_targets_wherever_the_text_goes(bench):
    bench.open(1, [1, 2, 3], steps="3")
    bench.blocks(1)
    text = [1, 2, 3]
    rng = random.Random(1)
    for _ in range(10):
        committed = bench.runner.complete(text, 2)[: rng.randrange(3)] + [rng.randrange(90)]
        bench.core.apply(Commit((1, 1), len(text), committed))
        text += committed
        bench.blocks(1)
        drafted = bench.blocks(1)[1]
        assert paths(drafted)[0] == bench.runner.complete(text, 3)
        assert set(drafted.sources) == {"lookahead"}


@pytest.mark.parametrize("steps", [1, 3])
def test_a_draft_allows_a_number_of_lookahead_steps_and_the_next_one_reports_them(bench, steps):
    bench.open(1, [1, 2, 3], steps=str(steps))
    assert bench.blocks(1)[1].num_forwards == 0
    assert bench.runner.forwards == [2 + ROWS, *[ROWS] * (steps - 1)]
    assert bench.blocks(1)[1].num_forwards == steps
    bench.core.apply(Commit((1, 1), 3, [7, 8]))
    assert not bench.core.has_work, "commits alone cost nothing"


@pytest.mark.parametrize("wants_probs", [False, True])
def test_lookahead_steps_do_not_depend_on_the_clock_if_drafts_affect_the_output(fake_runner_class, wants_probs):
    """Verification results come after none of the steps, some, or all of them, alone or with other sequences."""
    found = set()
    for num_core_steps in (1, 2, 3, 50):
        bench = LookaheadBench(fake_runner_class(num_pages=128))
        text, drafts = [1, 2, 3], []
        bench.open(1, text, steps="3", draft_affects_output=True, wants_probs=wants_probs, temperature=1.0)
        if num_core_steps == 2:
            bench.open(2, [4] * 30)
            bench.core.apply(request(bench.core, 2, 8, 0))
        for round_number in range(6):
            bench.sink.answers.clear()
            bench.core.apply(request(bench.core, 1, 8, 0))
            while not any(answer.key == (1, 1) for answer in bench.sink.answers):
                bench.core.step()
            (answer,) = (answer for answer in bench.sink.answers if answer.key == (1, 1))
            drafts.append(tuple(answer.drafted.draft_ids))
            for _ in range(num_core_steps):
                if bench.core.has_work:
                    bench.core.step()
            committed = [(round_number * 7) % 90, 5]
            bench.core.apply(Commit((1, 1), len(text), committed))
            text = text + committed
        found.add(tuple(drafts))
    assert len(found) == 1
    assert any(found.pop())


def test_guesses_for_verification_by_rejection_know_nothing_of_the_target_s_noise(fake_runner_class):
    drafts = []
    for seed in range(1, 5):
        bench = LookaheadBench(fake_runner_class(num_pages=128))
        bench.open(1, [7, 7, 7], steps="3", seed=seed, draft_affects_output=True, wants_probs=True, temperature=50.0)
        drafts.append([bench.blocks(1, takes_trees=False)[1].draft_ids for _ in range(2)])
    assert drafts[0] == drafts[1] == drafts[2] == drafts[3] and drafts[0][-1]


def test_only_committed_ids_of_a_lookahead_window_keep_their_kv(bench):
    bench.open(1, [1, 2, 3])
    bench.blocks(1)
    bench.core.apply(Commit((1, 1), 3, [4, 5, 6, 7]))
    bench.runner.forwards.clear()
    bench.blocks(1)
    assert bench.runner.forwards == [3 + ROWS]


def test_windows_share_forwards_and_long_prompts_come_in_chunks(bench):
    for n in range(1, 5):
        bench.open(n, [n, n + 1])
    bench.open(5, [n % 90 for n in range(100)])
    bench.blocks(*range(1, 6))
    assert max(bench.runner.forwards) <= MAX_ROWS
    assert bench.runner.forwards[0] == 3 * (1 + ROWS) + 1 + 6, "what fits no window is prefilled meanwhile"
    bench.runner.forwards.clear()
    bench.blocks(1, 2, 3, 4)
    assert bench.runner.forwards == [4 * ROWS]


def test_lookahead_drafts_a_tree_if_the_target_supports_trees_else_the_most_recent_chain(bench):
    bench.open(1, [1, 2, 3, 4, 1, 7, 8, 9, 1], seed_from_prompt="1")
    tree = bench.blocks(1)[1]
    assert (tree.draft_ids, tree.parents) == ([7, 8, 9, 2, 3, 4], [-1, 0, 1, -1, 3, 4])
    bench.core.apply(Close((1, 1)))
    bench.open(1, [1, 2, 3, 4, 1, 7, 8, 9, 1], seed_from_prompt="1")
    chain = bench.blocks(1, takes_trees=False)[1]
    assert (chain.draft_ids, chain.parents) == ([7, 8, 9], None)
    bench.core.apply(Close((1, 1)))
    bench.open(1, [1, 2, 3, 4, 1, 7, 8, 9, 1], seed_from_prompt="1")
    assert bench.blocks(1, num_tokens=4)[1].draft_ids == [7, 8, 9, 2]


def test_seeding_of_the_pool_follows_the_committed_text(bench):
    bench.open(1, [1, 2], seed_from_prompt="1")
    bench.core.apply(Commit((1, 1), 2, [3]))
    bench.core.apply(Commit((1, 1), 3, [4, 5, 1]))
    assert bench.blocks(1)[1].draft_ids[:3] == [2, 3, 4]


@pytest.mark.parametrize("draft_affects_output", [False, True])
def test_a_long_text_is_pooled_in_parts_between_which_others_draft(
    fake_runner_class, monkeypatch, draft_affects_output
):
    text = [n * n % 89 for n in range(60)]
    whole = LookaheadBench(fake_runner_class())
    whole.open(1, text, seed_from_prompt="1", draft_affects_output=draft_affects_output)
    whole.blocks(1)

    monkeypatch.setattr(drafter, "_MAX_POOLED_AT_ONCE", 8)
    bench = LookaheadBench(fake_runner_class())
    bench.open(1, text, seed_from_prompt="1", draft_affects_output=draft_affects_output)
    bench.open(2, [1, 2, 3, 4, 1], seed_from_prompt="1")
    pool = next(iter(bench.core.host._drafters["lookahead"]._states.values())).pool
    assert len(pool) == 8 - 3, "n-grams of four among the first eight ids"
    for n in (1, 2):
        bench.core.apply(request(bench.core, n, 3, 0))
    bench.core.step()
    assert [answer.key[1] for answer in bench.sink.answers] == ([2] if draft_affects_output else [1, 2])
    while bench.core.has_work:
        size = len(pool)
        bench.core.step()
        assert len(pool) <= size + 8
    assert len(pool) == len(next(iter(whole.core.host._drafters["lookahead"]._states.values())).pool)
    if draft_affects_output:
        assert bench.sink.answers[-1].drafted.draft_ids == whole.sink.answers[-1].drafted.draft_ids[:3]
    assert bench.blocks(1)[1].draft_ids == whole.blocks(1)[1].draft_ids


def test_verification_by_rejection_gets_certain_chains(bench):
    bench.open(1, [1, 2, 3, 4, 1], seed_from_prompt="1", wants_probs=True, temperature=1.0)
    drafted = bench.blocks(1, takes_trees=False)[1]
    assert (drafted.draft_ids, list(drafted.draft_probs)) == ([2, 3, 4], [])


def test_lookahead_stops_iterating_near_the_end_of_the_context(fake_runner_class):
    bench = LookaheadBench(fake_runner_class(max_context=20))
    bench.open(1, [1] * 15, seed_from_prompt="1")  # its last row would stand at 14 + 3 + 2
    assert bench.blocks(1)[1].draft_ids == [1, 1, 1]
    assert bench.runner.forwards
    bench.runner.forwards.clear()
    bench.core.apply(Commit((1, 1), 15, [1]))
    assert bench.blocks(1)[1].draft_ids == [1, 1, 1]
    assert not bench.runner.forwards


def test_ids_the_model_does_not_have_end_lookahead_iteration(bench):
    bench.open(1, [1, 2, 3])
    bench.core.apply(Commit((1, 1), 3, [1_000]))
    bench.open(2, [1, 1_000])
    assert {n: drafted.draft_ids for n, drafted in bench.blocks(1, 2).items()} == {1: [], 2: []}
    assert not bench.runner.forwards


@pytest.mark.parametrize("committed", [[1_000], [1] * 20], ids=["an id it lacks", "the end of the context"])
def test_a_commit_beyond_the_context_ends_pending_lookahead_steps(fake_runner_class, committed):
    """A forward would raise, and cost others, whose tokens may depend on their drafts, a round."""
    bench = LookaheadBench(fake_runner_class(max_context=40))
    bench.open(1, [1] * 16, steps="8")
    bench.core.apply(request(bench.core, 1, 8, 0))
    bench.core.step()
    bench.core.step()
    assert bench.core.has_work
    bench.core.apply(Commit((1, 1), 16, committed))
    assert not bench.core.has_work


def test_a_failed_forward_costs_its_steps_and_no_draft(bench, caplog):
    bench.open(1, [1, 2, 3], steps="3")
    bench.blocks(1)
    bench.runner.fail_next = True
    assert bench.blocks(1)[1].draft_ids
    assert "drafter lookahead failed" in caplog.text
    bench.blocks(1)
    assert paths(bench.blocks(1)[1])[0] == bench.runner.complete([1, 2, 3], 3)
    assert not bench.sink.failures


def test_without_pages_for_a_window_lookahead_drafts_from_its_pool(fake_runner_class):
    bench = LookaheadBench(fake_runner_class(num_pages=3, page_size=4, max_context=40))
    bench.open(1, [1, 2, 3, 4, 1], seed_from_prompt="1")
    assert bench.blocks(1)[1].draft_ids == [2, 3, 4]
    assert not bench.runner.forwards


def test_a_sequence_larger_than_all_pages_is_not_computed_and_takes_no_page(fake_runner_class):
    bench = LookaheadBench(fake_runner_class(num_pages=12, page_size=4))
    bench.open(1, [n % 90 for n in range(40)])  # with a window of 12 rows more than 48 slots
    bench.open(2, [7] * 10, "model")
    bench.blocks(2)
    num_free, num_forwards = bench.runner.page_table.num_free, len(bench.runner.forwards)
    bench.blocks(1)
    assert bench.runner.page_table.num_free == num_free and len(bench.runner.forwards) == num_forwards


def test_idle_sequences_of_either_drafter_give_up_their_pages(fake_runner_class):
    bench = LookaheadBench(fake_runner_class(num_pages=7, page_size=4, max_context=24))
    prompts = {n: [n] * 10 for n in range(1, 5)}
    for n, prompt in prompts.items():
        bench.open(n, prompt, "model" if n % 2 else "lookahead", **({} if n % 2 else {"steps": "3"}))
    for _ in range(2):
        for n, prompt in prompts.items():
            drafted = bench.blocks(n, num_tokens=3)[n]
            if n % 2:
                assert drafted.draft_ids == bench.runner.complete(prompt, 3)
    for n in (2, 4):
        assert paths(bench.blocks(n)[n])[0] == bench.runner.complete(prompts[n], 3)


@pytest.mark.parametrize("seed", range(8))
def test_random_commits_requests_and_closes_leak_no_page(fake_runner_class, seed):
    rng = random.Random(seed)
    runner = fake_runner_class(num_pages=rng.choice([24, 60]), max_context=120)
    bench = LookaheadBench(runner)
    texts = {}
    for _ in range(150):
        n = rng.randrange(1, 7)
        match rng.randrange(5):
            case 0 if n not in texts:
                texts[n] = [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
                is_model = rng.random() < 0.3
                options = {} if is_model else {"steps": str(rng.randrange(1, 5)), "seed_from_prompt": "1"}
                bench.open(n, texts[n], "model" if is_model else "lookahead", max_length=2000, **options)
            case 1 if n in texts:
                bench.core.apply(Close((1, n)))
                del texts[n]
            case 2 | 3 if n in texts:
                entry = bench.core._sequences[1, n]
                if not entry.requests:
                    bench.core.apply(request(bench.core, n, rng.randrange(1, 9), 0, rng.random() < 0.5))
            case _ if n in texts and not bench.core._sequences[1, n].requests:
                ids = [rng.choice([rng.randrange(90), runner.next_id(texts[n])]) for _ in range(rng.randrange(1, 5))]
                bench.core.apply(Commit((1, n), len(texts[n]), ids))
                texts[n] += ids
        if rng.random() < 0.6:
            bench.core.step()
        bench.core.check_integrity()
    assert not bench.sink.failures
    assert sum(bool(answer.drafted.draft_ids) for answer in bench.sink.answers) > 5
    bench.core.apply(CloseLink(1))
    assert runner.page_table.num_free == runner.page_table.num_pages


def test_a_commit_for_another_length_closes_the_sequence_and_frees_its_pages(bench):
    bench.open(1, [1, 2, 3])
    bench.blocks(1)
    bench.core.apply(Commit((1, 1), 7, [1]))
    assert list(bench.sink.failures) == [(1, 1)]
    assert bench.runner.page_table.num_free == bench.runner.page_table.num_pages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": "1"}, "drafter.settings.window = 1: must be an integer from 2 to 256"),
        ({"ngram_size": "1"}, "drafter.settings.ngram_size = 1: must be an integer from 2 to 64"),
        ({"guesses": "0"}, "drafter.settings.guesses = 0: must be an integer from 1 to 256"),
        ({"steps": "0"}, "drafter.settings.steps = 0: must be an integer from 1 to 64"),
        ({"seed_from_prompt": "yes"}, "drafter.settings.seed_from_prompt = yes: must be an integer from 0 to 1"),
        ({"window": "17"}, "window = 17: with ngram_size = 4 must be at most 16, as a forward has 48 rows"),
        ({"levels": "3"}, "drafter.settings = levels: must be one of window, ngram_size"),
    ],
)
def test_bad_lookahead_settings_are_rejected_by_name(bench, settings, message):
    bench.open(1, [1, 2], **settings)
    error = bench.sink.failures[1, 1]
    assert isinstance(error, InvalidArgumentError)
    assert message in str(error)


def test_a_window_that_fits_no_forward_is_refused_at_start(fake_runner_class):
    with pytest.raises(InvalidArgumentError, match="window = 15: with ngram_size = 5 must be at most 12"):
        LookaheadDrafter(fake_runner_class(), MAX_ROWS, 6, LookaheadSettings(window=15, ngram_size=5))


def test_the_same_request_begins_with_the_same_window(fake_runner_class):
    """Which guesses it makes depends on the request's seed and on nothing else."""

    def run(seed):
        bench = LookaheadBench(fake_runner_class(num_pages=128))
        params = SamplingParams(temperature=0.0, ignore_eos=True, seed=seed)
        bench.core = DraftCore(bench.drafters(), [], bench.sink, 8)
        bench.core.apply(Open((1, 1), params, range(30), (), 200, "lookahead"))
        for _ in range(6):
            bench.blocks(1)
        drafter = bench.core.host._drafters["lookahead"]
        (state,) = drafter._states.values()
        return list(state.pool._ngrams)

    assert run(3) == run(3) != run(4)
