"""Trees change no token: random trees, commits, stale blocks and page shortages against plain decoding."""

import random

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.rpc.link.commands import Close
from tests.engine.tiny import save_tiny
from tests.verify_worker.harness import Bench


def random_tree(rng, truth, num_nodes, vocab_size):
    """Ids and parents of a tree in which some path may follow the truth; siblings may be equal."""
    ids, parents, depths = [], [], []
    for node in range(num_nodes):
        parent = rng.randrange(max(-1, node - 5), node)
        depth = depths[parent] + 1 if parent >= 0 else 0
        is_right = depth < len(truth) and rng.random() < 0.6
        ids.append(truth[depth] if is_right else rng.randrange(vocab_size))
        parents.append(parent)
        depths.append(depth)
    return ids, parents


class Speculating:
    """Opens sequences, verifies random trees and chains for them until each has `num_tokens`, beside `bench`."""

    def __init__(self, bench, rng, truths, vocab_size):
        self.bench, self.rng, self.truths, self.vocab_size = bench, rng, truths, vocab_size
        self.outputs = {n: [] for n in truths}
        self.longest_path = 0

    def round(self, prompts, unfinished):
        blocks = {}
        for n in unfinished:
            base, rest = len(prompts[n]) + len(self.outputs[n]), self.truths[n][len(self.outputs[n]) :]
            ids, parents = random_tree(self.rng, rest, self.rng.randrange(1, 12), self.vocab_size)
            if self.rng.random() < 0.2:
                parents = []
            if self.rng.random() < 0.2:
                self.bench.block(n, base + 1, ids, parents=parents)  # stale
            num_plain_steps = self.rng.choice([0, 0, 2])
            self.bench.block(n, base, ids, num_plain_steps, parents=parents)
            blocks[n, base] = ids
        seen = len(self.bench.sink.decisions)
        self.bench.run()
        for decision in self.bench.sink.decisions[seen:]:
            n = decision.key[1]
            ids = blocks.get((n, decision.base_length), [])
            path = range(decision.num_accepted) if decision.path is None else decision.path
            self.longest_path = max(self.longest_path, len(path))
            assert decision.base_length == len(prompts[n]) + len(self.outputs[n])
            self.outputs[n] += [*(ids[node] for node in path), decision.next_id]

    def run(self, prompts, num_tokens):
        while unfinished := [n for n in prompts if len(self.outputs[n]) < num_tokens]:
            self.round(prompts, unfinished)
        for n in prompts:
            assert self.outputs[n][:num_tokens] == self.truths[n][:num_tokens]


def free_everything(bench, sequence_ids):
    for n in sequence_ids:
        bench.core.apply(Close((1, n)))
    bench.core.check_integrity()
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_give_the_tokens_of_no_speculation(fake_runner_class, seed):
    rng = random.Random(seed)
    bench = Bench(fake_runner_class(num_pages=rng.choice([24, 200])), max_rows=rng.choice([13, 40]))
    prompts = {n: [rng.randrange(90) for _ in range(rng.randrange(1, 20))] for n in range(1, 6)}
    truths = {n: bench.runner.complete(prompt, 60) for n, prompt in prompts.items()}
    for n, prompt in prompts.items():
        bench.open(n, prompt, max_length=90)
    speculating = Speculating(bench, rng, truths, bench.runner.vocab_size)
    speculating.run(prompts, 40)
    assert speculating.longest_path >= 3 and bench.sink.stales
    free_everything(bench, prompts)


def decode_plainly(runner, prompts, num_tokens, params):
    bench = Bench(runner)
    for n, prompt in prompts.items():
        bench.open(n, prompt, **params[n])
        bench.block(n, len(prompt), [], num_tokens)
    bench.run()
    logprobs = {n: [d.logprobs[0] for d in bench.sink.decisions if d.key == (1, n) and d.logprobs] for n in prompts}
    outputs = {n: bench.emitted(n, {}) for n in prompts}
    free_everything(bench, prompts)
    return outputs, logprobs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_a_real_model_gives_the_same_tokens_and_logprobs(tmp_path, family, dtype):
    """Sampling, penalties, a minimal length and a bias, each along the node's own path."""
    config = EngineConfig(save_tiny(tmp_path, family), dtype=dtype, num_pages=64, compile="off", self_check=False)
    runner = load_runner(config)
    rng = random.Random(3)
    prompts = {n: [rng.randrange(101) for _ in range(rng.randrange(1, 30))] for n in range(1, 4)}
    ruled = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((5, 1.5),), "min_new_tokens": 9}
    params = {
        1: {"temperature": 0.9, "seed": 11, "top_p": 0.9, **ruled},
        2: {"temperature": 0.0, "num_logprobs": 2, "presence_penalty": 0.3},
        3: {"temperature": 1.2, "seed": 12, "top_k": 20, "num_logprobs": 0},
    }
    truths, logprobs = decode_plainly(runner, prompts, 40, params)
    bench = Bench(runner)
    for n, prompt in prompts.items():
        bench.open(n, prompt, **params[n])
    speculating = Speculating(bench, rng, truths, 101)
    speculating.run(prompts, 24)
    for n in (2, 3):
        found = [logprob for d in bench.sink.decisions if d.key == (1, n) for logprob in d.logprobs]
        assert found[:24] == logprobs[n][:24]
    assert speculating.longest_path >= 3
    free_everything(bench, prompts)


@pytest.fixture
def bench(fake_runner_class):
    return Bench(fake_runner_class())


def test_the_path_is_reported_and_its_kv_lies_in_order(bench):
    truth = bench.runner.complete([1, 2, 3], 4)
    bench.open(1, [1, 2, 3])
    bench.block(1, 3, [90, truth[0], 91, truth[1], truth[2], 92], parents=[-1, -1, 0, 1, 3, 3])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.path, decision.num_accepted, decision.next_id) == ([1, 3, 4], 3, truth[3])
    assert decision.num_draft_tokens == 6
    (seq,) = bench.core._sequences.values()
    slots = [bench.runner.slots[bench.runner._slot(seq.page_ids, slot)] for slot in range(seq.kv_length)]
    assert slots == [1, 2, 3, *truth[:3]] and seq.kv_length == seq.committed_length - 1


def test_depth_counts_towards_max_length_not_nodes(bench):
    truth = bench.runner.complete([1, 2, 3], 2)
    bench.open(1, [1, 2, 3], max_length=5)
    bench.block(1, 3, [90, 91, truth[0]], parents=[-1, -1, -1])
    bench.run()
    assert bench.emitted(1, {3: [90, 91, truth[0]]}) == truth
    bench.open(2, [1, 2, 3], max_length=5)
    bench.block(2, 3, [90, 91], parents=[-1, 0])
    assert isinstance(bench.sink.failures[(1, 2)], InvalidArgumentError)


def test_nodes_beyond_the_last_page_are_not_looked_at(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=2, page_size=4))
    truth = bench.runner.complete([1, 2, 3], 2)
    bench.open(1, [1, 2, 3], max_length=8)
    ids = [90, 91, truth[0], 92, 93, 94, truth[0]]
    bench.block(1, 3, ids, parents=[-1, -1, -1, -1, -1, -1, -1])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.path, decision.next_id, decision.num_draft_tokens) == ([2], truth[1], 7)
