"""Targets that remember beside attention: random drafts, trees, chunks and too few pages give `generate()`'s tokens."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.bench.near_tie import first_difference, is_near_tie
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks
from betoken.engine.config import EngineConfig
from tests.engine.tiny import save_tiny
from tests.engine.tiny_hybrids import by_width
from tests.verify_worker.harness import Bench
from tests.verify_worker.speculating import Speculating, decode_plainly, free_everything

NUM_TOKENS = 24
FAMILIES = (
    *("lfm2", "lfm2_moe", "lfm3"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"),
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2", "zamba2"),
    *("jamba", "mamba", "falcon_mamba", "zamba", "minimax", "recurrent_gemma"),
)


def gap(logits: torch.Tensor) -> float:
    best, second = logits.topk(2).values.tolist()
    return best - second


@pytest.mark.parametrize("family", by_width(FAMILIES))
def test_any_speculation_gives_the_tokens_of_generate(tmp_path, family: str) -> None:
    directory = save_tiny(tmp_path, family)
    # Slots for two of the five sequences.
    config = EngineConfig(directory, dtype="float32", num_pages=33, page_size=4, compile="off")
    runner = load_runner(config)
    rng = random.Random(9)
    prompts = {n: [rng.randrange(101) for _ in range(rng.randrange(1, 30))] for n in range(1, 6)}
    alone = {"max_length": 90}
    truths = {n: decode_plainly(runner, {n: ids}, NUM_TOKENS + 16, {n: alone})[0][n] for n, ids in prompts.items()}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    for n, ids in prompts.items():
        tensor = torch.tensor([ids])
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
        options["use_cache"] = family != "zamba2"  # whose step after a cache has no least time step, unlike its forward
        theirs = model.generate(tensor, attention_mask=torch.ones_like(tensor), **options)  # id 0 is no padding
        at = first_difference(truths[n][:NUM_TOKENS], theirs[0, len(ids) :].tolist())
        if at is not None:
            before = ids + truths[n][:at]
            ours = forward_in_chunks(runner, before, 8)[-1]
            assert is_near_tie(gap(ours), gap(model(torch.tensor([before])).logits[0, -1]))
    bench = Bench(runner, max_rows=17, max_prefill_rows=6)
    for n, ids in prompts.items():
        bench.open(n, ids, max_length=90)
    speculating = Speculating(bench, rng, truths, 101)
    speculating.run(prompts, NUM_TOKENS)
    assert speculating.longest_path >= 3 and bench.sink.stales and bench.scheduler.num_preemptions > 0
    free_everything(bench, prompts)
