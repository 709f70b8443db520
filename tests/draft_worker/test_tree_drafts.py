"""Trees of a real model: its likeliest tokens at every node, the same whatever was drafted and committed before."""

import math
import random
import time

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.commands import Commit, Open
from betoken.draft_worker.core import DraftCore
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.model.settings import ModelSettings
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.sampler import SampleGroup, perturbed_top
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import PARAMS, RecordingSink, request
from tests.engine.tiny import save_tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def runner(directory):
    return load_runner(EngineConfig(directory, num_pages=48, compile="off", self_check=False))


class Bench:
    """A core with one model drafter; counts its forwards."""

    def __init__(self, runner, max_rows=24, settings=None):
        self.runner, self.sink, self.num_forwards = runner, RecordingSink(), 0
        drafter = ModelDrafter(runner, max_rows, 8, "early_exit", settings or ModelSettings(3))
        self.core = DraftCore({"model": drafter}, [runner.page_table], self.sink, 8)

    def open(self, n, ids, num_prompt, params, wants_probs=False, **settings):
        texts = (tuple(ids[:num_prompt]), tuple(ids[num_prompt:]))
        self.core.apply(Open((1, n), params, *texts, 400, settings=settings, wants_probs=wants_probs))

    def draft(self, sizes, takes_trees=True):
        """(ids, parents) by sequence, for a number of nodes each."""
        self.sink.answers.clear()
        for n, num_tokens in sizes.items():
            self.core.apply(request(self.core, n, num_tokens, time.perf_counter_ns(), takes_trees))
        self.num_forwards = 0
        while self.core.has_work:
            self.core.step()
            self.num_forwards += 1
            self.core.check_integrity()
        return {answer.key[1]: answer.drafted for answer in self.sink.answers}

    def free_everything(self):
        self.core.apply(CloseLink(1))
        assert self.sink.load.num_free_pages == self.sink.load.num_pages
        assert not self.sink.failures


def parents_of(drafted):
    return drafted.parents if drafted.parents is not None else list(range(-1, len(drafted.draft_ids) - 1))


def children_of(drafted):
    """Ids below each node, best first; below -1 the first ones."""
    children = {}
    for node, (token_id, parent) in enumerate(zip(drafted.draft_ids, parents_of(drafted), strict=True)):
        children.setdefault(parent, []).append((token_id, node))
    return children


def expected_after(runner, prompt, output, params):
    """Possible next ids by the model, from a separate forward."""
    ids = prompt + output
    pages, _ = runner.page_table.allocate(ids)
    logits = runner.forward([Segment(pages, 0, ids, 1)]).logits
    runner.page_table.release(pages)
    best, log_shares = perturbed_top(logits, [SampleGroup(params, prompt, output, [])], 3, 1.0)
    return [i for i, share in zip(best[0].tolist(), log_shares[0].tolist(), strict=True) if share > -math.inf]


@pytest.mark.parametrize("n", PARAMS)
def test_children_of_a_tree_node_are_the_likeliest_tokens_with_noise_under_the_rules_of_their_path(runner, n):
    bench = Bench(runner)
    prompt, output, params = list(range(3, 20)), [7, 9, 7], PARAMS[n]
    bench.open(n, prompt + output, len(prompt), params)
    drafted = bench.draft({n: 10})[n]
    assert bench.num_forwards <= 10
    assert drafted.parents is not None and len(drafted.draft_ids) == 10
    assert set(drafted.sources) == {"early_exit"}
    paths = {-1: []}
    for node, (token_id, parent) in enumerate(zip(drafted.draft_ids, drafted.parents, strict=True)):
        paths[node] = [*paths[parent], token_id]
    for parent, children in children_of(drafted).items():
        ids = [token_id for token_id, _ in children]
        assert ids == expected_after(runner, prompt, output + paths[parent], params)[: len(ids)]
    if not params.ignore_eos:
        ends = [node for node, token_id in enumerate(drafted.draft_ids) if token_id in params.eos_token_ids]
        assert not set(ends) & set(drafted.parents)
    bench.free_everything()


@pytest.mark.parametrize("seed", range(4))
def test_trees_depend_on_the_ids_alone(runner, directory, seed):
    """With other sequences, after any commits, with few tokens and few pages: equal to a fresh worker's draft."""
    rng = random.Random(seed)
    fresh_runner = load_runner(EngineConfig(directory, num_pages=200, compile="off", self_check=False))
    bench = Bench(runner, max_rows=rng.choice([9, 40]))
    texts = {n: [rng.randrange(101) for _ in range(rng.randrange(2, 70))] for n in PARAMS}
    num_prompt = {n: len(text) for n, text in texts.items()}
    for n, text in texts.items():
        bench.open(n, text, num_prompt[n], PARAMS[n])
    num_trees = 0
    for _ in range(12):
        sizes = {n: rng.randrange(1, 12) for n in texts if rng.random() < 0.8} or {1: 4}
        takes_trees = rng.random() < 0.8
        drafts = bench.draft(sizes, takes_trees)
        for n, drafted in drafts.items():
            fresh = Bench(fresh_runner)
            fresh.open(n, texts[n], num_prompt[n], PARAMS[n])
            (expected,) = fresh.draft({n: sizes[n]}, takes_trees).values()
            fresh.free_everything()
            assert (drafted.draft_ids, drafted.parents) == (expected.draft_ids, expected.parents), (seed, n)
            assert drafted.parents is None or takes_trees
            num_trees += drafted.parents is not None
        for n, text in texts.items():
            committed = walk(rng, drafts[n]) if n in drafts else []
            committed.append(rng.randrange(101))
            bench.core.apply(Commit((1, n), len(text), committed))
            text += committed
    assert num_trees > 8
    bench.free_everything()


def walk(rng, drafted):
    """The ids of a random path from the root."""
    children, ids, node = children_of(drafted), [], -1
    while node in children and rng.random() < 0.8:
        token_id, node = rng.choice(children[node])
        ids.append(token_id)
    return ids


def test_one_branch_no_trees_and_probabilities_give_the_same_chain(runner):
    text = list(range(20))
    bench = Bench(runner)
    bench.open(1, text, 20, PARAMS[3], max_branches="1")
    bench.open(2, text, 20, PARAMS[3])
    bench.open(3, text, 20, PARAMS[3], wants_probs=True)
    one_branch, no_trees = bench.draft({1: 5})[1], bench.draft({2: 5}, takes_trees=False)[2]
    assert one_branch.draft_ids == no_trees.draft_ids and one_branch.parents is no_trees.parents is None
    with_probs = bench.draft({3: 5})[3]
    assert with_probs.parents is None and len(with_probs.draft_probs) == 5
    bench.free_everything()


def test_tree_settings_may_be_set_per_sequence_and_are_rejected_by_name(runner):
    bench = Bench(runner, settings=ModelSettings())
    text = list(range(20))
    bench.open(1, text, 20, PARAMS[1])
    bench.open(2, text, 20, PARAMS[1], max_branches="4", max_depth="2")
    drafts = bench.draft({1: 8, 2: 8})
    assert drafts[1].parents is None
    depths = []
    for parent in drafts[2].parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    assert max(depths) == 2
    for name, value in (("max_branches", "0"), ("max_branches", "17"), ("max_depth", "-1"), ("min_ngram", "1")):
        bench.open(9, text, 20, PARAMS[1], **{name: value})
        error = bench.sink.failures.pop((1, 9))
        assert isinstance(error, InvalidArgumentError) and name in str(error)
    bench.free_everything()


def test_without_room_for_a_tree_there_is_no_draft_and_no_leak(directory):
    small = load_runner(EngineConfig(directory, num_pages=2, page_size=4, compile="off", self_check=False))
    bench = Bench(small)
    bench.open(1, list(range(7)), 7, PARAMS[1])
    drafted = bench.draft({1: 8})[1]
    assert 1 <= len(drafted.draft_ids) <= 8, "what follows the last token is known from the rows there was room for"
    bench.open(2, list(range(9)), 9, PARAMS[1])
    assert bench.draft({2: 8})[2].draft_ids == []
    bench.free_everything()
