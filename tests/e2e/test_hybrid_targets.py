"""Targets and draft models whose layers mix tokens in other ways than attention, through real services."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair import make_pair
from transformers import (
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    MiniMaxConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
)

from betoken.bench.identity import main

CELLS = {
    "short convolution": [
        "float32-t0-ngram-k4-c8",
        "float32-t0-lookahead-k8-c8",
        "float32-t0.8-early_exit_tree-k4-c8",
        "bfloat16-t0.8-ngram@attached-k4-c8-verify-killed",
    ],
    "gated delta": [
        "float32-t0-model_tree-k8-c8",
        "float32-t0.8-lookahead-k8-c1",
        "bfloat16-t0-model_tree-k4-c8-preemption",
        "bfloat16-t0-ngram-k4-c8-preemption",
    ],
    "mamba-2": [
        "float32-t0-early_exit_tree-k4-c8",
        "float32-t0.8-model_tree-k8-c8",
        "bfloat16-t0-model-k4-c8-draft-killed",
        "bfloat16-t0.8-ngram-k4-c8",
    ],
}
"""Cells of each by default, on two sets of services; all of the matrix where time is plenty."""
COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
CONFIGS = {
    "short convolution": lambda: Lfm2Config(
        **COMMON,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "gated delta": lambda: Qwen3_5TextConfig(
        **COMMON,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "mamba-2": lambda: GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["mamba", "full_attention", "mamba"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        num_local_experts=0,
        shared_intermediate_size=64,
    ),
}
WIDER = {
    "mamba": lambda: JambaConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, attn_layer_period=4, attn_layer_offset=1, mamba_d_state=8
    ),
    "lightning attention": lambda: MiniMaxConfig(
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "rg-lru": lambda: RecurrentGemmaConfig(
        **COMMON,
        w_init_variance_scale=4.0,
        attention_window_size=64,
        block_types=["recurrent", "attention"],
    ),
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """Runs cells over a random pair; how many there were, none of which failed."""

    def run_cells(name: str, cells: list[str], *options: str) -> int:
        make_pair(tmp_path, (CONFIGS | WIDER)[name]())
        arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--limit", "8"]
        arguments += ["--few-pages", "24", "--compile", "off", "--out", str(tmp_path / "out"), "--cells", *cells]
        status = main([*arguments, *options])
        output = capsys.readouterr().out
        summary = json.loads(output.splitlines()[-1])
        assert status == 0, output
        assert summary["failed"] == 0 and summary["compared"] >= 8 * (summary["cells"] - 4)  # four are compared with
        assert summary["are_pages_free"]
        return int(summary["cells"])

    return run_cells


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONFIGS)
def test_its_tokens_are_those_of_no_speculation(run: Callable[..., int], name: str) -> None:
    assert run(name, CELLS[name], "--max-new-tokens", "32", "--prefix-caching") == len(CELLS[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WIDER)
def test_tokens_of_further_kinds_are_those_of_no_speculation(run: Callable[..., int], name: str) -> None:
    cells = [cell for cells in CELLS.values() for cell in cells]
    assert run(name, cells, "--max-new-tokens", "32", "--prefix-caching") == len(cells)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", CONFIGS)
def test_its_tokens_are_those_of_no_speculation_in_the_whole_matrix(run: Callable[..., int], name: str) -> None:
    assert run(name, ["*"], "--max-new-tokens", "32", "--prefix-caching") > 300
