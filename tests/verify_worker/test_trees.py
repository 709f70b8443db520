"""Trees change no token: random trees, commits, stale blocks and page shortages against plain decoding."""

import random

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from tests.engine.tiny import save_tiny
from tests.verify_worker.harness import Bench
from tests.verify_worker.speculating import Speculating, decode_plainly, free_everything


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_trees_of_a_real_model_give_the_same_tokens_and_logprobs(tmp_path, family, dtype):
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


def test_the_accepted_path_is_reported_and_its_kv_is_in_order(bench):
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


def test_tree_nodes_beyond_the_last_page_are_not_verified(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=2, page_size=4))
    truth = bench.runner.complete([1, 2, 3], 2)
    bench.open(1, [1, 2, 3], max_length=8)
    ids = [90, 91, truth[0], 92, 93, 94, truth[0]]
    bench.block(1, 3, ids, parents=[-1, -1, -1, -1, -1, -1, -1])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.path, decision.next_id, decision.num_draft_tokens) == ([2], truth[1], 7)
