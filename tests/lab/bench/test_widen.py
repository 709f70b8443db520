"""A widened checkpoint has the shape asked for and the small model's logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from betoken.bench import widen as widen_module
from betoken.bench.widen import main, widen
from betoken.cli.local_services import embedded_models
from tests.engine.tiny import CONFIGS, save_tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 192,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
IDS = torch.arange(1, 81)[None] % 97


def logits(directory: Path | str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(input_ids=IDS).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_key_heads", [2, 4])
def test_logits_are_the_small_models_and_further_ids_never_win(
    num_key_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS["llama"]()
    config.num_key_value_heads = num_key_heads
    monkeypatch.setitem(CONFIGS, "llama", lambda: config)
    small = save_tiny(tmp_path / "small", "llama")
    widen(Path(small), LlamaConfig(**SHAPE), tmp_path / "large")
    expected, wide = logits(small), logits(tmp_path / "large")
    assert wide.shape[1] == 130
    torch.testing.assert_close(wide[:, :101], expected, rtol=0, atol=2e-4)
    assert bool((wide[:, 101:] < expected.min() - 100).all())


def test_a_head_that_is_the_embeddings_stays_so(tmp_path: Path) -> None:
    pair = embedded_models()
    assert pair is not None
    shape = SHAPE | {"vocab_size": 4100, "intermediate_size": 400, "tie_word_embeddings": True}
    config = widen(pair / "draft", LlamaConfig(**shape), tmp_path)
    assert config.tie_word_embeddings and config.max_position_embeddings == 1024
    expected, wide = logits(pair / "draft"), logits(tmp_path)
    spread = wide[:, :4096] - wide[:, :1]
    torch.testing.assert_close(spread, expected - expected[:, :1], rtol=0, atol=0.3)  # weights are bfloat16
    assert float((wide.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9
    assert (tmp_path / "tokenizer.json").is_file()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tmp_path.glob("*.safetensors"))


def test_files_in_the_output_folder_of_widen_are_kept(tmp_path: Path) -> None:
    small = save_tiny(tmp_path, "llama")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="is not empty"):
        widen(Path(small), LlamaConfig(**SHAPE), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 1}, "num_hidden_layers: the shape's 1 is below 2"),
        ("llama", {"hidden_size": 60}, "hidden_size: the shape's 60 is not above 64"),
        ("llama", {"head_dim": 24}, "head_dim: the shape's 24 is not a multiple of 16"),
        ("llama", {"num_attention_heads": 4}, "the shape has 1 heads per key, below 2"),
        ("llama", {"tie_word_embeddings": True}, "ties its head"),
        ("qwen3", {}, "of type qwen3"),
        ("gpt2", {}, "of type gpt2"),
    ],
)
def test_bad_options_of_widen_are_rejected_with_a_message(
    family: str,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = save_tiny(tmp_path, family)
    monkeypatch.setattr(widen_module, "shape_config", lambda name: LlamaConfig(**SHAPE | changes))
    assert main(["--model", small, "--shape", "llama-3-8b", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
