"""Logprobs of prompts: each position once, with the same bits in any chunks, company, cache and shortage."""

import random

import pytest
import torch

from betoken.common.errors import InternalError
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks
from betoken.engine.config import EngineConfig
from betoken.engine.sampler import logprobs_of_tokens
from betoken.kernels.build import find_compiler
from betoken.kernels.cpu import LIBRARY
from tests.engine.tiny import save_tiny
from tests.verify_worker.harness import Bench
from tests.verify_worker.speculating import Speculating, free_everything

NUM_TOP = 3
VOCAB_SIZE = 101


def alone(runner, prompt, num_top=NUM_TOP):
    """Prompt logprobs of a worker with a single sequence."""
    bench = Bench(runner, max_rows=256)
    bench.open(1, prompt, max_length=90, num_prompt_logprobs=num_top)
    bench.run()
    told = bench.sink.prompt_logprobs.get((1, 1), [])
    free_everything(bench, [1])
    return told


@pytest.mark.parametrize(
    ("family", "dtype", "choice"),
    [
        ("gemma2", "float32", "off"),
        ("llama", "bfloat16", "off"),
        ("lfm2", "float32", "off"),
        ("mamba2", "float32", "off"),
        pytest.param("qwen3_next", "float32", "off", marks=pytest.mark.slow),
        pytest.param("bamba", "bfloat16", "off", marks=pytest.mark.slow),
        pytest.param("mixtral", "float32", "off", marks=pytest.mark.slow),
        pytest.param("llama", "float32", "on", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "bfloat16", "on", marks=pytest.mark.slow),
    ],
)
def test_prompt_logprobs_in_any_batch_and_shortage_have_the_bits_of_the_prompt_alone(tmp_path, family, dtype, choice):
    """Chunks, streams that decode and speculate, equal beginnings in the cache, preemption, re-opening."""
    if choice == "on" and find_compiler(LIBRARY) is None:
        pytest.skip("no C++ compiler")
    config = EngineConfig(
        save_tiny(tmp_path, family), dtype=dtype, num_pages=33, page_size=4, compile=choice, self_check=choice == "on"
    )
    runner = load_runner(config)
    rng = random.Random(11)
    beginning = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    prompts = {n: beginning[: rng.randrange(20, 30)] + [rng.randrange(VOCAB_SIZE)] * n for n in range(1, 7)}
    truths = {n: alone(runner, prompt) for n, prompt in prompts.items()}
    for n, prompt in prompts.items():
        rows = forward_in_chunks(runner, prompt, 7)[:-1]
        assert truths[n] == list(enumerate(logprobs_of_tokens(rows, prompt[1:], NUM_TOP), 1))
    bench = Bench(runner, max_rows=17, max_prefill_tokens=5)
    starts = {n: rng.randrange(len(prompt)) if n > 4 else 0 for n, prompt in prompts.items()}
    for n, prompt in prompts.items():  # two of them behind what their clients have
        bench.open(n, prompt, max_length=90, num_prompt_logprobs=NUM_TOP, num_sent=starts[n])
        bench.block(n, len(prompt), [1, 2], num_plain_steps=20)
    num_interrupted = 0
    while bench.core.has_work:
        bench.step()
        bench.check_integrity()
        if rng.random() < 0.3:
            num_interrupted += take_pages(bench, rng)
    for n in prompts:
        assert bench.sink.prompt_logprobs.get((1, n), []) == truths[n][starts[n] :]
    assert num_interrupted > 0 and not bench.sink.failures
    free_everything(bench, prompts)


def take_pages(bench, rng):
    """Have a sequence lose its pages, as to an older one; whether part of its prompt logprobs was sent."""
    seq = rng.choice([seq for seq in bench.core._sequences.values() if seq.page_ids])
    bench.scheduler.release(seq)
    seq.is_preempted = True
    return seq.has_pending_prompt_logprobs and seq.next_to_send > 1 + seq.opened.num_sent


def test_the_answer_does_not_depend_on_prompt_logprobs(tmp_path):
    runner = load_runner(EngineConfig(save_tiny(tmp_path, "llama"), dtype="float32", num_pages=64, compile="off"))
    rng = random.Random(5)
    prompts = {n: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for n in range(1, 5)}
    params = {"temperature": 0.8, "seed": 4, "num_logprobs": 2}
    plain = Bench(runner)
    for n, prompt in prompts.items():
        plain.open(n, prompt, **params)
        plain.block(n, len(prompt), [], 30)
    plain.run()
    truths = {n: plain.emitted(n, {}) for n in prompts}
    free_everything(plain, prompts)
    bench = Bench(runner, max_rows=20)
    for n, prompt in prompts.items():
        bench.open(n, prompt, num_prompt_logprobs=0, **params)
    speculating = Speculating(bench, rng, truths, VOCAB_SIZE)
    speculating.run(prompts, 20)
    for n, prompt in prompts.items():
        assert [position for position, _ in bench.sink.prompt_logprobs.get((1, n), [])] == [*range(1, len(prompt))]
        found = [one for d in bench.sink.decisions if d.key == (1, n) for one in d.logprobs]
        assert found[:20] == [one for d in plain.sink.decisions if d.key == (1, n) for one in d.logprobs][:20]
    free_everything(bench, prompts)


def test_a_prompt_with_logprobs_is_computed_whole_and_cached_for_others(fake_runner_class):
    bench = Bench(fake_runner_class())
    prompt = list(range(20))
    for sequence_id in (1, 2):
        bench.open(sequence_id, prompt, num_prompt_logprobs=1)
        bench.run()
    assert sum(bench.runner.forwards) == 19 + 19 and bench.scheduler.num_cached_tokens == 0
    bench.open(3, prompt)
    bench.run()
    assert sum(bench.runner.forwards) == 19 + 19 + 3
    bench.open(4, prompt, num_prompt_logprobs=1, num_sent=9)  # positions 0 to 8 were sent before
    bench.run()
    assert sum(bench.runner.forwards) == 19 + 19 + 3 + 19 - 8
    first, second, fourth = (bench.sink.prompt_logprobs[1, n] for n in (1, 2, 4))
    assert first == second and first[9:] == fourth
    assert (1, 3) not in bench.sink.prompt_logprobs


def test_logits_of_a_long_prompt_are_never_held_all_at_once(fake_runner_class, monkeypatch):
    monkeypatch.setattr("betoken.verify_worker.scheduler._MAX_TOLD_ROWS", 7)
    bench = Bench(fake_runner_class(), max_rows=64)
    widths = []
    forward = bench.runner.forward
    monkeypatch.setattr(bench.runner, "forward", lambda segments: noted(forward(segments), widths))
    for sequence_id in (1, 2):
        bench.open(sequence_id, [sequence_id, *range(40)], num_prompt_logprobs=2)
        bench.block(sequence_id, 41, [], 1)
    bench.run()
    assert max(widths) <= 7 + 2  # tokens of drafts are added
    for sequence_id in (1, 2):
        assert [position for position, _ in bench.sink.prompt_logprobs[1, sequence_id]] == [*range(1, 41)]


def noted(output, widths):
    widths.append(len(output.logits))
    return output


def test_the_router_learns_that_prompt_logprobs_are_pending(fake_runner_class, monkeypatch):
    monkeypatch.setattr("betoken.rpc.link.sequence_table.PENDING_INTERVAL_S", 0.0)
    bench = Bench(fake_runner_class(), max_rows=4)
    bench.open(1, list(range(20)), num_prompt_logprobs=0)
    bench.step()
    assert bench.sink.pendings == [[(1, 1)]]
    bench.run()
    assert bench.sink.pendings[-1:] == [[(1, 1)]] and len(bench.sink.pendings) == 4  # the last forward owes nothing


def test_a_prompt_whose_logits_are_not_finite_fails_alone(fake_runner_class, monkeypatch):
    bench = Bench(fake_runner_class())
    forward = bench.runner.forward

    def spoilt(segments):
        output = forward(segments)
        output.logits[0] = torch.nan
        return output

    monkeypatch.setattr(bench.runner, "forward", spoilt)
    for sequence_id in (1, 2):
        bench.open(sequence_id, [1, 2, 3, 4], num_prompt_logprobs=1)
        bench.block(sequence_id, 4, [], 1)
    bench.run()
    assert isinstance(bench.sink.failures[1, 1], InternalError) and list(bench.sink.failures) == [(1, 1)]
    assert list(bench.sink.prompt_logprobs) == [(1, 2)]
    bench.check_integrity()


def test_a_prompt_of_one_token_has_no_pending_logprobs(fake_runner_class):
    bench = Bench(fake_runner_class())
    bench.open(1, [5], num_prompt_logprobs=1)
    assert not bench.core.has_work
