"""How much longer a verify step of six rows takes than a step of one row, on a CPU, for models of the embedded size.

    python -m betoken.bench.block_step [--models gated-delta] [--rows 6] [--pairs 40] [--threads 2]

Models are hybrids with random weights, and a dense one. Blocks are accepted in part, at random, so that a step applies
what the one before left pending next to the state. Every pair is two steps close in time. The block's rows are compared
first with the same rows one at a time, to the last bit. A difference prints no speed. The last stdout line is one JSON
object; the status is 1 when a model was not right.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Lfm2Config, LlamaConfig, Qwen3_5TextConfig

from betoken.bench.command import positive
from betoken.bench.gpu.step_models import describe
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.paired_ratio import estimate
from betoken.engine.attention import ATTENTION_NAME, register_attention
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import runner_of
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner

CONTEXT = 128
NUM_WARM_UP = 5
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def _layers(mixer: str) -> list[str]:
    return ([mixer] * 3 + ["full_attention"]) * 2


MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: LlamaConfig(**_COMMON),
    "gated-delta": lambda: Qwen3_5TextConfig(
        **_COMMON,
        head_dim=64,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=_layers("linear_attention"),
    ),
    "mamba-2": lambda: GraniteMoeHybridConfig(
        **_COMMON,
        layer_types=_layers("mamba"),
        mamba_n_heads=12,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        num_local_experts=0,
        shared_intermediate_size=1024,
    ),
    "short-conv": lambda: Lfm2Config(**_COMMON, block_auto_adjust_ff_dim=False, layer_types=_layers("conv")),
}
"""Shapes by name: as deep and wide as the embedded target, three layers in four of another kind than attention."""


class Growing:
    """One sequence that grows by blocks, of which a part is accepted."""

    def __init__(self, runner: ModelRunner, rng: random.Random, max_length: int) -> None:
        self._runner, self._rng = runner, rng
        self._vocab_size = runner.info.vocab_size
        self._page_ids, _ = runner.page_table.allocate(range(max_length))
        ids = self.draw(CONTEXT)
        runner.forward([Segment(self._page_ids, 0, ids, 0)])
        self._length = CONTEXT

    def draw(self, num_ids: int) -> list[int]:
        """Random ids."""
        return [self._rng.randrange(self._vocab_size) for _ in range(num_ids)]

    def step(self, block: list[int], num_accepted: int) -> torch.Tensor:
        """Logits [rows, V] after a committed id and drafts, of which so many are accepted."""
        segment = Segment(self._page_ids, self._length, block, len(block), num_committed=self._length + 1)
        logits = self._runner.forward([segment]).logits
        self._length += 1 + num_accepted
        return logits

    def close(self) -> None:
        """Give the pages back."""
        self._runner.page_table.release(self._page_ids)


def find_fault(runner: ModelRunner, num_rows: int) -> str:
    """A row in a block that is not the row alone; empty if there is none."""
    rng = random.Random(0)
    in_block, alone = (Growing(runner, random.Random(1), CONTEXT + num_rows * 2) for _ in range(2))
    try:
        block = [rng.randrange(runner.info.vocab_size) for _ in range(num_rows)]
        expected = in_block.step(block, 0).clone()
        for row, token_id in enumerate(block):
            if not torch.equal(alone.step([token_id], 0)[0], expected[row]):
                return f"row {row} of {num_rows} is not the row alone"
        return ""
    finally:
        in_block.close()
        alone.close()


def measure(runner: ModelRunner, num_rows: int, num_pairs: int) -> dict[str, Any]:
    """Times of both steps, milliseconds, and their ratio with its interval."""
    rng = random.Random(0)
    max_length = CONTEXT + (NUM_WARM_UP + num_pairs + 1) * num_rows
    plain, drafted = (Growing(runner, random.Random(2), max_length) for _ in range(2))
    times: list[tuple[float, float]] = []
    for index in range(NUM_WARM_UP + num_pairs):
        sides = [(plain, plain.draw(1), 0), (drafted, drafted.draw(num_rows), rng.randrange(num_rows))]
        spent = [0.0, 0.0]
        for side in (0, 1) if index % 2 else (1, 0):
            sequence, block, num_accepted = sides[side]
            start = time.perf_counter()
            sequence.step(block, num_accepted)
            spent[side] = time.perf_counter() - start
        times.append((spent[0], spent[1]))
    plain.close()
    drafted.close()
    times = times[NUM_WARM_UP:]
    middle = [round(1000 * sorted(side)[len(times) // 2], 3) for side in zip(*times, strict=True)]
    ratio = estimate([block / one for one, block in times])
    return {"one_row_ms": middle[0], "block_ms": middle[1]} | asdict(ratio)


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Gate, then times, of one shape."""
    register_attention()
    torch.manual_seed(0)
    make: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = make(MODELS[name](), dtype=getattr(torch, options.dtype), attn_implementation=ATTENTION_NAME)
    length = CONTEXT + (NUM_WARM_UP + options.pairs + 2) * options.rows
    config = EngineConfig(
        f"random {name}",
        dtype=options.dtype,
        num_threads=options.threads,
        num_pages=3 * -(-length // 16) + 16,
        compile=options.compile,
    )
    runner = runner_of(config, model.eval().requires_grad_(False), describe(name, model))
    result: dict[str, Any] = {"model": name, "rows": options.rows, "numerics": runner.numerics}
    result["state_bytes"] = runner.state_bytes
    fault = find_fault(runner, options.rows)
    return result | ({"fault": fault} if fault else measure(runner, options.rows, options.pairs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print; 1 when a model was not right."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.block_step", description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS), help="shapes to measure")
    add("--rows", type=positive, default=6, help="rows of the longer step")
    add("--pairs", type=positive, default=40, help="measured pairs of steps")
    add("--threads", type=positive, default=2, help="CPU threads")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="type of weights and activations")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="compile the forward")
    options = parser.parse_args(arguments)
    results = []
    for name in options.models:
        results.append(result := run_model(name, options))
        if "fault" in result:
            print(f"{name:<12} {result['fault']}: no speed", flush=True)
            continue
        print(
            f"{name:<12} 1 row {result['one_row_ms']:.3f} ms, {options.rows} rows {result['block_ms']:.3f} ms:"
            f" {result['ratio']:.3f} x ({result['low']:.3f} to {result['high']:.3f})",
            flush=True,
        )
    about = {"hardware": describe_hardware(), "versions": describe_versions()}
    print(json.dumps({"bench": "block_step", "models": results} | about))
    return 1 if any("fault" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
