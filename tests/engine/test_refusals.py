"""Rejections at load time, with their reasons."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from betoken.engine.attention import CONTEXT_KEYWORD, ProbeContext, _attention_forward
from betoken.engine.bring_up.load import load_runner, runner_of
from betoken.engine.bring_up.self_check import forward_in_chunks
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import REFUSED_MULTIMODAL
from betoken.engine.families.frequencies import settle_frequencies
from betoken.engine.families.refusals import check_layers
from betoken.engine.mixers.handed import hand_over
from betoken.engine.weights.checkpoint import resolve_directory
from betoken.engine.weights.loading import load_model
from betoken.kernels.cpu import load_cpu_kernels
from tests.engine.tiny import save_tiny

_PER_LAYER = pytest.mark.skipif(
    not hasattr(PreTrainedConfig, "per_layer_config"), reason="this transformers has one value for all layers"
)
_LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": _LONGROPE}, "set max_context, to 128 or less"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"is_encoder_decoder": True}, "encoder"),
    ],
)
def test_configurations_that_read_other_rows_are_rejected(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelRefusedError, match=reason):
        check_layers(SimpleNamespace(**settings))
        settle_frequencies(SimpleNamespace(**settings), max_context=256, is_asked=False)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_without_a_config_that_can_be_read_is_reported(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "config.json").mkdir()  # cannot be opened, not even by root
    with pytest.raises(ModelRefusedError, match=r"(No such file|Is a directory).*config\.json'$"):
        load_model(EngineConfig(model=str(tmp_path)), lambda stage, fraction: None)


@pytest.mark.parametrize("model_type", ["fancy", "blip-2"])
def test_code_of_a_checkpoint_is_not_run(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would ask on the terminal, and import it if the answer is yes."""
    monkeypatch.setattr("builtins.input", lambda prompt: "yes")
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": classes}))
    (tmp_path / "own.py").write_text("print('run')")
    with pytest.raises(ModelRefusedError, match=f"^model type '{model_type}' is code of the checkpoint's own"):
        load_model(EngineConfig(model=str(tmp_path)), lambda stage, fraction: None)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["blip-2", "t5"])
def test_a_model_type_that_is_not_a_language_model_is_rejected(model_type: str, tmp_path: Path) -> None:
    """Not by the names of all that are, nor by what else it lacks."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelRefusedError, match=f"^model type '{model_type}' is not a causal language model"):
        load_model(EngineConfig(model=str(tmp_path)), lambda stage, fraction: None)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "is the decoder of a model with an encoder"),
        ("got_ocr2", "is multimodal, and the location of its text"),
    ],
)
def test_a_part_of_another_model_is_reported(model_type: str, reason: str, tmp_path: Path) -> None:
    """transformers counts them among its causal language models."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelRefusedError, match=f"^model type '{model_type}' {reason}"):
        load_model(EngineConfig(model=str(tmp_path)), lambda stage, fraction: None)


@pytest.mark.parametrize("model_type", sorted(REFUSED_MULTIMODAL))
def test_a_multimodal_type_whose_text_cannot_be_served_says_why(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    reason = f"^model type '{model_type}': not even its text is served: {REFUSED_MULTIMODAL[model_type]}"
    with pytest.raises(ModelRefusedError, match=reason):
        load_model(EngineConfig(model=str(tmp_path)), lambda stage, fraction: None)


def test_checkpoint_code_of_a_type_in_transformers_is_ignored(tmp_path: Path) -> None:
    """Like the code of Phi-3 and DeepSeek-V3, which preceded transformers' own."""
    directory = save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": classes}))
    load_runner(EngineConfig(directory, compile="off", num_pages=8))


def test_longrope_within_its_original_length_is_served() -> None:
    settle_frequencies(SimpleNamespace(rope_parameters=_LONGROPE), max_context=128, is_asked=False)


@pytest.mark.parametrize(
    ("keywords", "mask", "reason"),
    [
        ({"s_aux": torch.zeros(3)}, None, r"layer 0 has sinks \(3,\) for 2 query heads"),
        ({"cu_seq_lens_q": torch.zeros(2)}, None, "cu_seq_lens_q"),
        ({}, torch.zeros(1), "mask"),
        ({"is_causal": False}, None, "causal"),
    ],
)
def test_attention_arguments_without_support_are_rejected(
    keywords: dict[str, object], mask: torch.Tensor | None, reason: str
) -> None:
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelRefusedError, match=reason):
        _attention_forward(module, heads, heads, heads, mask, **{CONTEXT_KEYWORD: ProbeContext()}, **keywords)


def test_attention_windows_that_the_mask_does_not_express_limit_the_context(tmp_path: Path) -> None:
    """A layer of MiniMax passes its attention a position that its mask excludes."""
    directory = save_tiny(tmp_path, "minimax")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 32}))
    with pytest.raises(ModelRefusedError, match="set max_context to 32"):
        load_runner(EngineConfig(directory, compile="off", num_pages=8))
    load_runner(EngineConfig(directory, compile="off", num_pages=8, max_context=32))


def test_a_window_in_the_configuration_of_a_model_without_windows_is_ignored(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 32, "use_sliding_window": False}))
    load_runner(EngineConfig(directory, compile="off", num_pages=8))


def test_a_model_that_raises_after_its_layers_are_replaced_is_rejected(tmp_path: Path) -> None:
    """Its router reads the weight of a linear layer that is not there any more."""
    config = EngineConfig(save_tiny(tmp_path, "longcat_flash"), compile="off", num_pages=8)
    if load_cpu_kernels(config.cache_dir) is None:
        pytest.skip("no C++ compiler: its layers stay as they are")
    with pytest.raises(ModelRefusedError, match="LongcatFlashForCausalLM cannot be run: its code reads the weight of"):
        load_runner(config)


class OwnProduct(nn.Module):
    """A linear layer that is not replaced by ours."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight.T)


def test_a_product_outside_the_replaced_layers_is_rejected(tmp_path: Path) -> None:
    config = EngineConfig(save_tiny(tmp_path, "llama"), compile="off", num_pages=8)
    if load_cpu_kernels(config.cache_dir) is None:
        pytest.skip("no C++ compiler: all products are torch's own, over padded blocks of rows")
    model, info = load_model(config, lambda stage, fraction: None)
    model.lm_head = OwnProduct(model.lm_head.weight)
    with pytest.raises(ModelRefusedError, match=r"rows are not independent: aten.matmul.default of .* and \(64, 101\)"):
        runner_of(config, model, info)


@pytest.mark.parametrize("max_num_batched_tokens", [2, 16])
def test_small_forwards_are_checked_at_load_too(max_num_batched_tokens: int, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    load_runner(EngineConfig(directory, compile="off", num_pages=4, max_num_batched_tokens=max_num_batched_tokens))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"num_pages": 3}, "3 pages are below 4"), ({"num_pages": 9, "page_size": 4}, "9 pages are below 10")],
)
def test_fewer_pages_than_the_check_at_load_takes_are_rejected(
    settings: dict[str, int], limit: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRefusedError, match=f"num_pages: {limit}"):
        load_runner(EngineConfig(save_tiny(tmp_path, "llama"), compile="off", **settings))  # type: ignore[arg-type]


def test_attention_finds_the_batch_where_no_keywords_reach_it() -> None:
    """As in Nemotron; without a batch it is refused."""

    class Model(nn.Module):
        layer_idx = 0

        def forward(self, **keywords: object) -> object:
            heads = torch.zeros(1, 2, 3, 8)
            return _attention_forward(self, heads, heads, heads, None)

    model, probe = Model(), ProbeContext()
    hand_over(model)
    model(**{CONTEXT_KEYWORD: probe})
    assert probe.shapes == {0: (2, 8, 8)}
    with pytest.raises(ModelRefusedError, match="called without a batch"):
        model()


def test_alibi_distances_that_falcon_rounds_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="falcon: alibi = true"):
        load_runner(EngineConfig(save_tiny(tmp_path, "falcon, alibi"), compile="off", num_pages=8))


def test_a_model_with_its_own_attention_code_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="its code does not use the attention interface of transformers"):
        load_runner(EngineConfig(save_tiny(tmp_path, "xglm"), compile="off", num_pages=8))


def test_a_directory_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="config.json"):
        load_runner(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "m" * 300, "directory/" + "m" * 5000])
def test_model_names_that_no_directory_can_have_are_rejected(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelRefusedError, match=f"^{model!r}"):
        resolve_directory(model, None)


def test_an_inaccessible_model_directory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one below another user's home."""

    def is_dir(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(ModelRefusedError, match=r"'/home/somebody/model': cannot be read: Permission denied"):
        resolve_directory("/home/somebody/model", None)


def test_a_checkpoint_without_some_of_its_weights_is_rejected(tmp_path: Path) -> None:
    """transformers would give them random values, other ones in every process."""
    directory = save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match="lacks 1 of the model's weights, as model.layers.1.mlp.up_proj.weight"):
        load_runner(EngineConfig(directory, compile="off", num_pages=8))


def test_weights_quantized_in_an_unknown_format_are_rejected(tmp_path: Path) -> None:
    """It would take the int8 numbers for the weights and leave the scales aside."""
    directory = save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[f"{name}_scale"] = weights[name].abs().max() / 127
    weights[name] = (weights[name] / weights[f"{name}_scale"]).round().to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match="do not use, as model.layers.1.mlp.up_proj.weight_scale"):
        load_runner(EngineConfig(directory, compile="off", num_pages=8))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": null}', "'hidden_size' expected int"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}', "ZeroDivisionError"),
        ("config.json", '{"model_type": "llama", "dtype": "nonsense"}', "nonsense"),
        ("model.safetensors", "", "is not a safetensors file"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", '{"model": null}', "tokenizer.json is not a tokenizer"),
    ],
)
def test_invalid_model_files_are_rejected(name: str, content: str, reason: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelRefusedError, match=reason):
        load_runner(EngineConfig(directory, compile="off", num_pages=8))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {
                "rope_parameters": {
                    **_LONGROPE,
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": "128",
                }
            },
            "TypeError",
        ),
        pytest.param(
            {"per_layer_config": {"0": {"max_position_embeddings": 48}}},
            "'max_position_embeddings' is a per-layer",
            marks=_PER_LAYER,
        ),
        pytest.param(
            {"per_layer_config": {"0": {"sliding_window": 8}}, "sliding_window": 9},
            "'sliding_window' is a per-layer",
            marks=_PER_LAYER,
        ),
    ],
)
def test_invalid_values_of_the_configuration_are_rejected(
    settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    directory = save_tiny(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelRefusedError, match=reason):
        load_runner(EngineConfig(directory, compile="off", num_pages=8))


def test_a_model_type_that_only_the_checkpoint_defines_is_rejected(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).save_pretrained(directory)
    with pytest.raises(ModelRefusedError, match="dtype: .* is stored in float64: set one of bfloat16, float16"):
        load_runner(EngineConfig(directory, dtype="auto", compile="off", num_pages=8))


def test_a_context_beyond_the_models_own_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="max_context"):
        load_runner(EngineConfig(save_tiny(tmp_path, "llama"), max_context=641))


def test_yarn_that_was_added_to_a_checkpoint_stretches_its_context(tmp_path: Path) -> None:
    """As Qwen asks for long texts: `max_position_embeddings` stays what it was."""
    directory = save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    config |= {"max_position_embeddings": 64, "rope_parameters": yarn}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = load_runner(EngineConfig(directory, dtype="float32", compile="off", num_pages=16))
    assert runner.info.max_context == 256
    ids = [7 * position % 101 for position in range(256)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager")
    theirs = model(torch.tensor([ids])).logits[0].detach()
    atol = theirs.abs().mean().item() * 1e-3
    torch.testing.assert_close(forward_in_chunks(runner, ids, 60), theirs, rtol=0, atol=atol)
    with pytest.raises(ModelRefusedError, match="max_context: 257 is above the model's own 256"):
        load_runner(EngineConfig(directory, max_context=257))


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelRefusedError, match="device 'nonsense' cannot be used"):
        load_runner(EngineConfig(save_tiny(tmp_path, "llama"), device="nonsense"))


@pytest.mark.parametrize("field", ["num_pages", "page_size", "max_num_batched_tokens", "num_threads"])
def test_engine_settings_out_of_range_name_the_field(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig("somewhere", **{field: 0})  # type: ignore[arg-type]
