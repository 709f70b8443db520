"""Unsupported checkpoints are rejected with the right reason at the first attempt, before large reads."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_sizes
from betoken.kernels.cpu import load_cpu_kernels
from tests.engine.tiny import save_tiny

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
_HEADS = {"n_layer": 2, "n_head": 4}
_LONGCAT = {
    **{"hidden_size": 32, "num_layers": 1, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2},
}
_OWN_ATTENTION = "its code does not use the attention interface"
_READS_WEIGHTS = "its code reads the weight of linear layers itself"
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "rwkv": ({**_SIZES, "attention_hidden_size": 32, "context_length": 64}, "its state is divided by a separate sum"),
    "xlnet": ({"d_model": 32, "d_inner": 64, **_HEADS}, _OWN_ATTENTION),
    "openai-gpt": ({"n_embd": 32, "n_positions": 64, **_HEADS}, _OWN_ATTENTION),
    "longcat_flash": (_LONGCAT, _READS_WEIGHTS),
}


def refusal(directory: Path | str, **options: Any) -> str:
    with pytest.raises(ModelRefusedError) as caught:
        load_runner(EngineConfig(str(directory), compile="off", dtype="float32", num_pages=16, **options))
    return str(caught.value)


@pytest.mark.parametrize("max_context", [None, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unsupported_family_is_rejected_with_its_own_reason(
    family: str, max_context: int | None, tmp_path: Path
) -> None:
    sizes, reason = FAMILIES[family]
    if reason == _READS_WEIGHTS and load_cpu_kernels(None) is None:
        pytest.skip("no C++ compiler: its layers stay as they are")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=101, **sizes))
    model.generation_config = GenerationConfig(eos_token_id=0)
    model.save_pretrained(tmp_path)
    assert reason in refusal(tmp_path, max_context=max_context)


def test_a_model_without_a_context_bound_takes_the_given_one(tmp_path: Path) -> None:
    directory = Path(save_tiny(tmp_path, "llama"))
    edit(directory / "config.json", lambda config: config.update(max_position_embeddings=-1))
    assert refusal(directory) == "the model names no max_position_embeddings: set max_context"
    runner = load_runner(EngineConfig(str(directory), compile="off", num_pages=16, max_context=64))
    assert runner.info.max_context == 64


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("has_model", [True, False])
def test_an_adapter_in_a_checkpoint_is_rejected(has_model: bool, tmp_path: Path) -> None:
    if has_model:
        save_tiny(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    reason = refusal(tmp_path)
    assert ("together with its base model" in reason) is has_model and "merge the two" in reason


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.timeout(60)
def test_a_model_file_that_is_a_pipe_is_rejected_without_a_wait(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert refusal(tmp_path) == f"{tmp_path / name} is not a regular file"


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null"])
@pytest.mark.timeout(60)
def test_a_model_file_that_is_a_device_is_rejected(target: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(target)
    assert refusal(tmp_path).endswith("model.safetensors is not a regular file")


@pytest.mark.parametrize("name", ["../x.safetensors", "/dev/zero", "x.st", "a/b.safetensors", "", ".", 5, None])
def test_a_shard_has_a_plain_name(name: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path.parent / f"{tmp_path.name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert f"names {name!r}: must be a plain name that ends in .safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10_000_000),
        ("vocab_size", 1 << 40),
        ("hidden_size", 1 << 40),
        ("intermediate_size", 1 << 40),
        ("num_attention_heads", 1 << 40),
        ("max_position_embeddings", 1 << 40),
    ],
)
@pytest.mark.timeout(60)
def test_absurd_sizes_of_a_configuration_are_rejected_at_once(name: str, value: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edit(tmp_path / "config.json", lambda config: config.update({name: value}))
    assert f"config.json: {name} = {value}: must be at most" in refusal(tmp_path)


def test_sizes_of_nested_configurations_are_checked_and_other_large_numbers_pass() -> None:
    check_sizes({"rope_theta": 10**12, "text_config": {"num_hidden_layers": 500, "max_position_embeddings": 1 << 30}})
    with pytest.raises(ModelRefusedError, match=r"text_config\.n_layer = 20000: must be at most 10000"):
        check_sizes({"text_config": {"n_layer": 20_000}})
