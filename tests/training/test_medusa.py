import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from betoken.training import medusa


def train(pair: Path, out: Path, *further: str) -> Path:
    options = [
        "--target",
        str(pair / "target"),
        "--out",
        str(out),
        "--run-dir",
        f"{out}_run",
        "--device",
        "cpu",
        "--compile",
        "off",
    ]
    options += ["--texts", str(pair / "texts.jsonl"), "--num-held-out", "4", "--max-length", "64", "--batch-rows", "4"]
    medusa.main([*options, "--tokens", "6000", "--threads", "1", "--num-heads", "2", *further])
    return out


@pytest.mark.parametrize("kind", ["shared head", "own heads", "backbone"])
def test_heads_learn_and_lie_in_the_published_layout(tiny_pair: Path, tmp_path: Path, kind: str) -> None:
    further = {"shared head": [], "own heads": ["--no-share-head"], "backbone": ["--backbone-lora", "2"]}[kind]
    out = train(tiny_pair, tmp_path / "heads", *further)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "medusa_lm_head.safetensors")
    names = {f"{head}.0.linear.{part}" for head in (0, 1) for part in ("weight", "bias")}
    if kind == "own heads":
        names |= {"0.1.weight", "1.1.weight"}
    assert tensors.keys() == names and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert config["version"] == ("1" if kind == "own heads" else "2")
    shares = config["medusa_rank_accuracies"]
    assert len(shares) == 2 and all(len(row) == medusa.NUM_RANKS and 0 < sum(row) <= 1 for row in shares)
    state = torch.load(tmp_path / "heads_run" / "checkpoint.pt", weights_only=True)
    (first, *_, last) = state["progress"]["held_out"] if len(state["progress"]["held_out"]) > 1 else (None, None)
    assert first is None or last[1] < first[1]
    assert "guess 1" in (out / "README.md").read_text() and (out / "loss.png").stat().st_size > 1000
    assert ((out / "target" / "config.json").exists()) == (kind == "backbone")
