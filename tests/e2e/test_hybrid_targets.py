"""Targets and draft models whose layers mix tokens in other ways than attention, through real services."""

import json
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

CELLS = [
    "float32-t0-none-k0-c1",
    "float32-t0-ngram-k4-c8",
    "float32-t0-model-k4-c8",
    "float32-t0-model_tree-k8-c8",
    "float32-t0.8-early_exit_tree-k4-c8",
    "float32-t0-lookahead-k8-c8",
    "bfloat16-t0.8-ngram-k4-c8",
    "bfloat16-t0-model-k4-c8-draft-killed",
    "bfloat16-t0.8-model_tree-k4-c8-preemption",
]
COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
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
        layer_types=["conv", "full_attention", "conv", "conv"],
    ),
    "gated delta": lambda: Qwen3_5TextConfig(
        **COMMON,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "mamba-2": lambda: GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["mamba", "full_attention", "mamba", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        num_local_experts=0,
        shared_intermediate_size=128,
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
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "rg-lru": lambda: RecurrentGemmaConfig(
        **COMMON,
        w_init_variance_scale=4.0,
        attention_window_size=64,
        block_types=["recurrent", "attention"],
    ),
}
ALL = [*CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in WIDER)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALL)
def test_its_tokens_are_those_of_no_speculation(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pair(tmp_path, (CONFIGS | WIDER)[name]())
    arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--limit", "8"]
    arguments += ["--max-new-tokens", "32", "--few-pages", "24", "--prefix-caching"]
    status = main([*arguments, "--compile", "off", "--out", str(tmp_path / "out"), "--cells", *CELLS])
    output = capsys.readouterr().out
    summary = json.loads(output.splitlines()[-1])
    assert status == 0, output
    assert summary["cells"] == len(CELLS) and summary["failed"] == 0
    assert summary["compared"] >= 8 * len(CELLS) and summary["are_pages_free"]
