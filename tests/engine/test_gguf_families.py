"""GGUF files of every served architecture: numbers and tokens equal transformers' own reading."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from betoken.engine.bring_up.load import runner_of
from betoken.engine.cpu.grouped_linear import pack_grouped_layers
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import ARCHITECTURES
from betoken.engine.weights.layers import ExpertWeights, GroupedEmbedding, GroupedLinear
from betoken.engine.weights.loading import load_model
from betoken.kernels.cpu import load_cpu_kernels
from tests.engine.gguf_families import FAMILIES, family_model, of_gpt_oss, write_family
from tests.engine.gguf_files import check_tokens, config_of, of_transformers, write_gguf


def check_numbers(ours: Any, theirs: Any) -> int:
    """Every weight is theirs, to the last bit; returns how many are kept in blocks."""
    num_grouped = 0
    for path, module in ours.named_modules():
        if isinstance(module, (GroupedLinear, GroupedEmbedding)):
            weight = theirs.get_submodule(path).weight
            expected = weight.T if type(theirs.get_submodule(path)).__name__ == "Conv1D" else weight
            assert torch.equal(module.grouped.dequantised(), expected), path
            num_grouped += 1
        elif isinstance(module, ExpertWeights):
            expected = theirs.get_parameter(path)
            if theirs.get_submodule(path.rpartition(".")[0]).is_transposed:
                expected = expected.transpose(1, 2)
            assert torch.equal(module.grouped.dequantised().view(expected.shape), expected), path
            num_grouped += 1
    dense, expected = ours.state_dict(), theirs.state_dict()
    assert len(dense) >= 2 and dense.keys() <= expected.keys()
    for name, weight in dense.items():
        assert torch.equal(weight, expected[name]), name
    return num_grouped


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_gguf_file_of_every_architecture_is_transformers_model(architecture: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", architecture, family_model(architecture))
    theirs = of_gpt_oss(path, family_model(architecture)) if architecture == "gpt-oss" else of_transformers(path)
    config = config_of(path, self_check=False)
    model, info = load_model(config, lambda stage, fraction: None)
    assert check_numbers(model, theirs) >= 8
    check_tokens(runner_of(config, model, info), theirs)


def test_every_supported_gguf_architecture_is_tested() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


def scaled(kind: str, theta: float = 10_000.0, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | numbers}


def factors_of_llama3(config: Any) -> np.ndarray:
    """Factors written by the converter for `llama3` positions: each frequency over the used one."""
    rope, size = config.rope_parameters, config.head_dim
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    waves = 2 * torch.pi / frequencies
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(waves > original / low, rope["factor"], between)
    found: np.ndarray = torch.where(waves < original / high, 1.0, factors).numpy()
    return found


LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LONG, SHORT = [1.0 + place / 2 for place in range(6)], [1.0 + place / 8 for place in range(6)]
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64)
LONGROPE = scaled(
    "longrope",
    **{"long_factor": LONG, "short_factor": SHORT, "original_max_position_embeddings": 256},
    **{"attention_factor": 1.25, "partial_rotary_factor": 0.75},
)
LEFT_OUT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softcaps": ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, {}),
    "other-heads": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, {}),
    "scaled-globally": (
        "gemma3",
        {"rope_parameters": {"full_attention": scaled("linear", 1e6, factor=8.0)["rope_parameters"]}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "local-positions": (
        "gemma3",
        {"rope_parameters": {"sliding_attention": scaled("default", 5000.0)["rope_parameters"]}},
        {"rope.freq_base": 1e6, "rope.freq_base_swa": 5000.0},
    ),
    "fewer-positions": ("gpt2", {"n_positions": 256}, {}),
    "rope-factors": ("llama", LLAMA3, {}),
    "linear": (
        "llama",
        scaled("linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "yarn": (
        "llama",
        YARN,
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "longrope": ("phi3", LONGROPE | {"original_max_position_embeddings": 256}, {}),
    "window": ("phi3", {"sliding_window": 5}, {}),
    "fewer-experts": (
        "qwen2moe",
        {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
        {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 64},
    ),
    "heads": ("qwen3", {"head_dim": 32}, {}),
    "narrow-experts": ("qwen3moe", {"moe_intermediate_size": 96}, {"expert_feed_forward_length": 96}),
    "base": ("starcoder2", scaled("default", 1e6), {}),
}
"""Content that transformers does not read: architecture, changes of the configuration, and of the keys."""


@pytest.mark.parametrize("name", LEFT_OUT)
def test_gguf_settings_that_transformers_ignores_are_read_from_the_file(name: str, tmp_path: Path) -> None:
    architecture, changes, keys = LEFT_OUT[name]
    theirs = family_model(architecture, **changes)
    more = {"rope_freqs.weight": factors_of_llama3(theirs.config)} if name == "rope-factors" else {}
    if name == "longrope":
        more = {f"rope_factors_{kind}.weight": np.float32(row) for kind, row in (("long", LONG), ("short", SHORT))}
    path = write_family(tmp_path / "tiny.gguf", architecture, theirs, True, keys, **more)
    config = config_of(path, self_check=False)
    check_tokens(runner_of(config, *load_model(config, lambda stage, fraction: None)), theirs)


def test_a_gguf_mixture_named_llama_is_a_mixture(tmp_path: Path) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2}
    theirs = family_model("llama", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    path = write_family(tmp_path / "tiny.gguf", "llama", theirs, changes=keys)
    model, _ = load_model(config_of(path), lambda stage, fraction: None)
    assert sum(isinstance(module, ExpertWeights) for module in model.modules()) == 4
    path = write_family(tmp_path / "dense.gguf", "llama", theirs, True, keys)
    config = config_of(path, self_check=False)
    check_tokens(runner_of(config, *load_model(config, lambda stage, fraction: None)), theirs)


@pytest.mark.parametrize(
    "architecture",
    ["bloom", "deci", "falcon", "gemma4", "mamba", "mistral", "nemotron", "stablelm", "t5", "umt5", "gemma"],
)
def test_an_unsupported_gguf_architecture_is_rejected_by_name(architecture: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", changes={"general.architecture": architecture})
    served = ", ".join(sorted(FAMILIES))
    with pytest.raises(ModelRefusedError, match=f"general.architecture = '{architecture}' is none of {served}"):
        load_model(config_of(path), lambda stage, fraction: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_that_multiplies_its_rows_goes_on_to(dtype: Any, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", "gemma2", family_model("gemma2"))
    theirs = of_transformers(path).to(getattr(torch, dtype))
    ours, _ = load_model(config_of(path, dtype), lambda stage, fraction: None)
    ids = torch.arange(90)
    assert torch.equal(ours.model.embed_tokens(ids), theirs.model.embed_tokens(ids))
    if (kernels := load_cpu_kernels()) is not None:
        pack_grouped_layers(ours, kernels)
        assert torch.equal(ours.model.embed_tokens(ids), theirs.model.embed_tokens(ids))
