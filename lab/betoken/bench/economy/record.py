"""Records what the simulator needs of a pair of models: times of forwards, and texts with what the draft model says.

    python -m betoken.bench.economy.record --target DIR --draft DIR --prompts FILE --out DIR

Times are the least of twenty medians, taken in turn, so that other work on the machine hardly counts. Texts are the
target's greedy answers. For each position the draft model's choice after the true text is kept, right or wrong. Writes
`costs.json` and, with a draft model and prompts, `texts.json`.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from betoken.bench.command import exit_status, positive
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.prompts import load_prompts
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams

CONTEXT = 256
NUM_SEQS = (1, 4, 16)
ROWS = (1, 2, 3, 4, 6, 9, 12, 17)
MAX_ROWS = 128
NUM_PASSES, NUM_TIMED = 20, 9


def time_ms(runner: ModelRunner, num_seqs: int, rows: int) -> float:
    """A forward of so many sequences with so many rows each after 256 tokens, the choice of their tokens included."""
    table = runner.page_table
    pages = [table.allocate(range(seq, seq + CONTEXT + rows))[0] for seq in range(num_seqs)]
    segments = [Segment(page_ids, CONTEXT, list(range(rows)), rows) for page_ids in pages]
    params = SamplingParams(temperature=0.0)
    groups = [SampleGroup(params, [0] * CONTEXT, [0], list(range(1, rows))) for _ in range(num_seqs)]
    durations = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        choose_tokens(runner.forward(segments).logits, groups)
        durations.append(time.perf_counter() - start)
    for page_ids in pages:
        table.release(page_ids)
    return round(1000 * median(durations), 4)


def record_costs(model: str, dtype: Any, num_threads: int | None, rows: Sequence[int]) -> list[dict[str, float]]:
    """Times by sequences and rows of each, milliseconds."""
    config = EngineConfig(model, dtype=dtype, num_threads=num_threads, num_pages=16 * (CONTEXT // 16 + 3))
    runner = load_runner(config)
    shapes = [(seqs, each) for seqs in NUM_SEQS for each in rows if seqs * each <= MAX_ROWS]
    least = dict.fromkeys(shapes, math.inf)
    for _ in range(NUM_PASSES):
        for seqs, each in shapes:
            least[seqs, each] = min(least[seqs, each], time_ms(runner, seqs, each))
    return [{"seqs": seqs, "rows": each, "ms": ms} for (seqs, each), ms in least.items()]


def record_text(target: Any, draft: Any, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
    """A greedy answer, and a character per token of it: 1 = the draft model says so too after the true text."""
    ids = torch.tensor([prompt_ids])
    with torch.no_grad():
        text = target.generate(ids, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens)
        guesses = draft(text).logits[0].argmax(-1).tolist()
    answer = text[0, len(prompt_ids) :].tolist()
    is_right = [guess == token_id for guess, token_id in zip(guesses[len(prompt_ids) - 1 :], answer, strict=False)]
    return {"prompt_ids": prompt_ids, "answer_ids": answer, "model_right": "".join("01"[right] for right in is_right)}


def main(options: argparse.Namespace) -> int:
    """Record and write."""
    options.out.mkdir(parents=True, exist_ok=True)
    costs: dict[str, Any] = {"verify": record_costs(options.target, options.dtype, None, ROWS)}
    if options.draft:
        costs["draft"] = record_costs(options.draft, options.dtype, 1, ROWS)
    costs |= {"hardware": describe_hardware(), "versions": describe_versions()}
    (options.out / "costs.json").write_text(json.dumps(costs, indent=1) + "\n")
    if options.draft and options.prompts:
        target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in (options.target, options.draft))
        tokenizer = AutoTokenizer.from_pretrained(options.target)
        texts = [
            record_text(target, draft, tokenizer(prompt.text).input_ids, options.max_new_tokens)
            for prompt in load_prompts(options.prompts, options.limit)
        ]
        lines = ",\n".join(json.dumps(text, separators=(",", ":")) for text in texts)
        (options.out / "texts.json").write_text(f"[\n{lines}\n]\n")
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.economy.record", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="directory or hub id of the target model")
    add("--draft", default="", help="of the draft model; without it only the target's times are recorded")
    add("--dtype", default="bfloat16", help="type of both models")
    add("--prompts", type=Path, help="file of prompts; texts are recorded of its first")
    add("--limit", type=positive, default=32, help="prompts to record")
    add("--max-new-tokens", type=positive, default=288, help="tokens of each answer")
    add("--out", type=Path, required=True, help="folder to write to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.economy.record", lambda: main(parse_options())))
