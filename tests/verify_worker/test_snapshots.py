"""Prefix caching of targets with recurrent states: a snapshot's text is, to the bit, one from nothing."""

import random

import pytest
import torch

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.page_table import PageTable
from betoken.engine.runner import ModelRunner
from betoken.engine.state_table import PageList, StateTable
from tests.engine.tiny import save_tiny
from tests.products import slow
from tests.verify_worker.harness import Bench
from tests.verify_worker.speculating import Speculating, decode_plainly, free_everything

PAGE_SIZE = 4
NUM_TOKENS = 12
MAX_LENGTH = 90


CASES = [
    pytest.param(("qwen3_5", "float32"), id="qwen3_5"),
    pytest.param(("bamba", "bfloat16"), id="bamba"),
    *(
        pytest.param((family, "float32"), id=family, marks=pytest.mark.slow)
        for family in ("kimi_linear", "nemotron_h", "mamba2", "jamba", "recurrent_gemma", "minimax")
    ),
]


@pytest.fixture(scope="module", params=CASES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    family, dtype = request.param
    directory = save_tiny(tmp_path_factory.mktemp("tiny"), family)
    options = {"page_size": PAGE_SIZE, "compile": "off", "self_check": False}
    return load_runner(EngineConfig(directory, dtype=dtype, num_pages=60, **options))


def remembering(runner: ModelRunner, num_pages: int, num_snapshots: int) -> Bench:
    """A core over the runner's pages, of which it has so many, and nothing in them."""
    old = runner.page_table._states
    assert old is not None
    states = StateTable(old.num_states, num_snapshots, old.num_waiting)
    runner.page_table = PageTable(num_pages, PAGE_SIZE, prefix_caching=num_snapshots > 0, states=states)
    return Bench(runner, max_rows=21, max_prefill_tokens=6)


def draw_prompt(rng: random.Random, texts: list[list[int]]) -> list[int]:
    """A common prefix, and a few distinct ids."""
    text = rng.choice(texts)
    return text[: rng.randrange(1, len(text) + 1)] + [rng.randrange(101) for _ in range(rng.randrange(1, 4))]


def states_of(runner: ModelRunner, pages: PageList) -> list[torch.Tensor]:
    assert pages.state is not None
    pool = runner._forward._states  # type: ignore[attr-defined]
    return [layer.state[pages.state.index].clone() for layer in pool.recurrent.values()]


def check_states(bench: Bench, runner: ModelRunner) -> None:
    """Every state equals the state of its ids computed in one pass."""
    for seq in list(bench.core._sequences.values()):
        if not seq.page_ids or not seq.page_ids.state.num_applied:
            continue
        num_applied, at_once = seq.page_ids.state.num_applied, PageList()
        if not runner.page_table.can_extend(at_once, num_applied):
            continue
        runner.page_table.extend(at_once, num_applied)
        runner.forward([Segment(at_once, 0, seq.ids[:num_applied], 0)])
        pairs = zip(states_of(runner, seq.page_ids), states_of(runner, at_once), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        runner.page_table.release(at_once)


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_snapshots_are_right_for_any_texts_in_any_order_and_without_free_pages(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.randrange(101) for _ in range(rng.randrange(8, 36))] for _ in range(3)]
    params = {"max_length": MAX_LENGTH, "num_logprobs": 2, "temperature": rng.choice([0.0, 0.8]), "seed": 5}
    prompts, truths, logprobs = {}, {}, {}
    for n in range(1, 13):
        prompts[n] = draw_prompt(rng, texts)
        remembering(runner, 60, 0)
        told = decode_plainly(runner, {n: prompts[n]}, NUM_TOKENS + 16, {n: params})
        truths[n], logprobs[n] = told[0][n], told[1][n]
        texts.append(prompts[n] + truths[n][: rng.randrange(1, NUM_TOKENS)])  # the next turn of a conversation

    bench = remembering(runner, rng.randrange(24, 32), rng.randrange(2, 7))
    speculating = Speculating(bench, rng, truths, 101)
    opened: list[int] = []
    for n, prompt in prompts.items():
        bench.open(n, prompt, **params)
        opened.append(n)
        unfinished = [n for n in opened if len(speculating.outputs[n]) < NUM_TOKENS]
        speculating.round(prompts, rng.sample(unfinished, rng.randrange(1, len(unfinished) + 1)))
        check_states(bench, runner)
        if len(opened) > 5:
            bench.close(opened.pop(rng.randrange(len(opened) - 1)))
    speculating.run({n: prompts[n] for n in opened}, NUM_TOKENS)
    for n, output_ids in speculating.outputs.items():
        decided = [d for d in bench.sink.decisions if d.key == (1, n)]
        told = [token for decision in decided for token in decision.logprobs]
        assert output_ids[: len(truths[n])] == truths[n][: len(output_ids)]
        assert told[: len(logprobs[n])] == logprobs[n][: len(told)]
    assert bench.scheduler.num_cached_tokens > 0 and bench.scheduler.num_preemptions > 0
    check_states(bench, runner)
    free_everything(bench, opened)


def ask(bench: Bench, n: int, prompt: list[int], num_tokens: int) -> list[int]:
    bench.open(n, prompt, max_length=MAX_LENGTH)
    bench.block(n, len(prompt), [], num_tokens)
    bench.run()
    bench.close(n)
    return bench.emitted(n, {})


def test_cached_tokens_are_reported(runner: ModelRunner) -> None:
    bench = remembering(runner, 60, 8)
    prompt = [(7 * n) % 101 for n in range(21)]
    answer = ask(bench, 1, prompt, 12)
    assert ask(bench, 2, prompt, 12) == answer
    ask(bench, 3, [*prompt, *answer, 4, 5], 2)
    told = {d.key[1]: d.num_cached_tokens for d in reversed(bench.sink.decisions)}
    assert told == {1: 0, 2: 20, 3: 32}  # whole pages of the prompt; of all but the answer's last, which was not run
    bench.check_integrity()
