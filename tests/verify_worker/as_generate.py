"""A checkpoint's answers under random drafts, trees, chunks and too few pages, compared with transformers."""

import random
from typing import Any

import torch

from betoken.bench.near_tie import first_difference, is_near_tie
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from tests.verify_worker.harness import Bench
from tests.verify_worker.speculating import Speculating, decode_plainly, free_everything

NUM_TOKENS = 16


def gap(logits: torch.Tensor) -> float:
    """The best logit's distance from the second."""
    best, second = logits.topk(2).values.tolist()
    return best - second


def assert_speculation_gives_the_tokens_of_generate(
    directory: str, model: Any, num_prompt_ids: int = 101, has_cache: bool = True
) -> ModelRunner:
    """`model`: transformers' own of that checkpoint, of 101 ids; prompts are made of the first `num_prompt_ids`."""
    # Slots for two of the five sequences.
    config = EngineConfig(directory, dtype="float32", num_pages=33, page_size=4, compile="off", self_check=False)
    runner = load_runner(config)
    rng = random.Random(9)
    prompts = {n: [rng.randrange(num_prompt_ids) for _ in range(rng.randrange(1, 30))] for n in range(1, 6)}
    alone = {"max_length": 90}
    truths = {n: decode_plainly(runner, {n: ids}, NUM_TOKENS + 16, {n: alone})[0][n] for n, ids in prompts.items()}
    for n, ids in prompts.items():
        tensor = torch.tensor([ids])
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "use_cache": has_cache}
        theirs = model.generate(tensor, attention_mask=torch.ones_like(tensor), **options)  # id 0 is not padding
        at = first_difference(truths[n][:NUM_TOKENS], theirs[0, len(ids) :].tolist())
        if at is not None:
            before = ids + truths[n][:at]
            ours = forward_in_chunks(runner, before, 8)[-1]
            assert is_near_tie(gap(ours), gap(model(torch.tensor([before])).logits[0, -1]))
    bench = Bench(runner, max_rows=17, max_prefill_tokens=6)
    for n, ids in prompts.items():
        bench.open(n, ids, max_length=90)
    speculating = Speculating(bench, rng, truths, 101)
    speculating.run(prompts, NUM_TOKENS)
    assert speculating.longest_path >= 3 and bench.sink.stales and bench.scheduler.num_preemptions > 0
    free_everything(bench, prompts)
    return runner
