import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from betoken.drafters.eagle3.checkpoint import TargetShape, load_layer
from betoken.training import eagle3


def train(pair: Path, out: Path, *further: str) -> Path:
    options = ["--target", str(pair / "target"), "--out", str(out), "--run-dir", f"{out}_run", "--device", "cpu"]
    options += ["--texts", str(pair / "texts.jsonl"), "--num-held-out", "4", "--max-length", "64", "--batch-rows", "4"]
    eagle3.main([*options, "--tokens", "6000", "--threads", "1", "--draft-vocab-size", "256", *further])
    return out


def test_a_layer_lies_in_the_published_layout_and_loads(tiny_pair: Path, tmp_path: Path) -> None:
    out = train(tiny_pair, tmp_path / "layer")
    tensors = load_file(out / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64) and tensors["fc.weight"].shape == (32, 96)
    assert tensors["d2t"].dtype == torch.int64 and int(tensors["t2d"].sum()) == 256
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    loaded = load_layer(out, TargetShape("target", vocab_size=512, hidden_size=32, num_layers=4))
    assert loaded.embedding is None and loaded.state_layers == (2, 2, 1)
    assert "tokens a forward" in (out / "README.md").read_text()
