"""GGUF files as models: their numbers and logits equal transformers'; unknown content is rejected."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from betoken.common.gguf import read_header
from betoken.common.gguf.header import TYPES
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.cpu import compiled as compiled_forward
from betoken.engine.cpu.grouped_linear import pack_grouped_layers
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.gguf import blocks
from betoken.engine.weights.gguf.blocks import GROUPED_TYPES, read_blocks
from betoken.engine.weights.layers import GroupedEmbedding, GroupedLinear, grouped_bytes
from betoken.engine.weights.loading import load_model
from betoken.kernels.cpu import load_cpu_kernels
from tests.engine.gguf_files import (
    NUMPY_QUANTIZES,
    SCALES_AT,
    TOKENS,
    check_tokens,
    config_of,
    of_package,
    of_transformers,
    put_scattered,
    tiny_model,
    write_gguf,
)
from tests.products import covering

TYPE_SIZES = {name: sizes for name, *sizes in TYPES.values()}
SEQUENCES = [[1, 2, 3, 4, 5], list(range(30, 90))]


@pytest.mark.parametrize(
    ("type_name", "is_tied"), covering(sorted({*NUMPY_QUANTIZES, *GROUPED_TYPES}), [False, True], strength=1)
)
def test_a_gguf_file_is_served_as_its_dequantized_blocks(type_name: str, is_tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", type_name, tiny_model(is_tied=is_tied))
    theirs = of_package(path)
    loaded, _ = load_model(config_of(path), lambda stage, fraction: None)
    num_grouped = 0
    for name, layer in loaded.named_modules():
        if isinstance(layer, (GroupedLinear, GroupedEmbedding)):
            num_grouped += 1
            assert torch.equal(layer.grouped.dequantised(), theirs.get_submodule(name).weight), name
    assert num_grouped == (16 if type_name in GROUPED_TYPES else 0)
    runner = load_runner(config_of(path))
    assert runner.info.model_id == "tiny" and runner.info.eos_token_ids == (0,)
    with torch.inference_mode():
        for ids, ours in zip(SEQUENCES, forward_together(runner, SEQUENCES), strict=True):
            expected = theirs(torch.tensor([ids])).logits[0]
            assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    check_tokens(runner, theirs)


def test_the_configuration_of_a_gguf_file_equals_transformers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", changes={"llama.rope.freq_base": 5e5})
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_dict()
    loaded, _ = load_model(config_of(path), lambda stage, fraction: None)
    ours = loaded.config.to_dict()
    named = {"_name_or_path", "dtype", "eos_token_id", "unk_token_id", "transformers_version", "architectures"}
    assert {name: value for name, value in ours.items() if name not in named} == {
        name: value for name, value in theirs.items() if name not in named
    }


def test_end_tokens_are_recognised_by_their_text_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [*TOKENS[:5], "<|im_end|>", *TOKENS[6:]]
    path = write_gguf(tmp_path / "tiny.gguf", changes={"tokenizer.ggml.tokens": tokens})
    with caplog.at_level(logging.INFO):
        _, info = load_model(config_of(path), lambda stage, fraction: None)
    assert info.eos_token_ids == (0, 5)
    assert f"{path}: end tokens: 0 (eos_token_id), 5 (<|im_end|>)" in caplog.text


def test_packing_the_weights_of_a_file_reports_its_progress(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    load_runner(config_of(write_gguf(tmp_path / "tiny.gguf")), lambda stage, fraction: told.append((stage, fraction)))
    packing = [fraction for stage, fraction in told if stage == "packing weights"]
    assert len(set(packing)) > 10 and packing == sorted(packing)
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)
    assert "ready" not in dict(told)


def test_tied_embeddings_are_kept_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model=tiny_model(is_tied=True))
    loaded, info = load_model(config_of(path), lambda stage, fraction: None)
    assert loaded.lm_head.grouped.values.data_ptr() == loaded.model.embed_tokens.grouped.values.data_ptr()
    assert info.num_parameters == sum(p.numel() for p in of_transformers(path).parameters())


@pytest.mark.parametrize("type_name", ["Q2_K", "Q8_0", "IQ3_S", "MXFP4"])
def test_gguf_blocks_have_the_same_numbers_read_in_slices(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 120, (5, 2 * 256 // 32 * 110), dtype=torch.uint8)
    rows = rows[:, : 2 * 256 // TYPE_SIZES[type_name][0] * TYPE_SIZES[type_name][1]].contiguous()
    whole = read_blocks(type_name, rows, 512, "t").dequantised()
    monkeypatch.setattr(blocks, "_SLICE_WEIGHTS", 1024)
    assert torch.equal(read_blocks(type_name, rows, 512, "t").dequantised(), whole)


HEADS = {"reference": (torch.float32, False), "float32": (torch.float32, True), "bfloat16": (torch.bfloat16, True)}
"""Type of a head, and whether its weights are packed for the CPU kernels."""


@pytest.mark.parametrize(("type_name", "head"), covering(sorted(GROUPED_TYPES), HEADS, strength=1))
def test_a_head_multiplies_by_the_exact_numbers_of_its_gguf_blocks(type_name: str, head: str, tmp_path: Path) -> None:
    """A row of zeros and a single one gives a weight of every output: its number in float32, whatever rows are in."""
    dtype, is_packed = HEADS[head]
    path = write_gguf(tmp_path / "tiny.gguf", type_name, tiny_model(num_layers=1))
    loaded, _ = load_model(config_of(path, str(dtype).removeprefix("torch.")), lambda stage, fraction: None)
    numbers, embedded = loaded.lm_head.grouped.dequantised(), loaded.model.embed_tokens.grouped.dequantised()
    if type_name not in ("MXFP4", "TQ1_0", "TQ2_0"):
        assert (numbers.bfloat16() != numbers).float().mean() > 0.5, "bfloat16 would not hold them"
    loaded.lm_head.keeps_sums = True
    if is_packed:
        if (kernels := load_cpu_kernels()) is None:
            pytest.skip("no compiler: the CPU kernels cannot be built here")
        pack_grouped_layers(loaded, kernels)
    assert torch.equal(loaded.lm_head(torch.eye(256, dtype=dtype)), numbers.T)
    assert torch.equal(loaded.lm_head(torch.eye(256, dtype=dtype)[3:5]), numbers.T[3:5])
    assert torch.equal(loaded.model.embed_tokens(torch.arange(len(embedded))), embedded.to(dtype))


WIDENED = {"Q2_K": 1.21, "TQ1_0": 1.24, "IQ1_S": 2.15, "IQ1_M": 2.07, "IQ2_XXS": 1.63, "IQ2_XS": 1.57, "IQ2_S": 1.41}
WIDENED |= {"IQ3_XXS": 1.43, "IQ3_S": 1.27}
"""Types that take more memory than their file, and how much more at most: see docs/weights.md."""


@pytest.mark.parametrize("type_name", sorted(GROUPED_TYPES))
def test_packed_gguf_weights_take_little_more_than_the_file(type_name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", type_name)
    if (kernels := load_cpu_kernels()) is None:
        pytest.skip("no compiler: the CPU kernels cannot be built here")
    in_file = sum(tensor.num_bytes for tensor in read_header(Path(path)).tensors if tensor.type == type_name)
    loaded, _ = load_model(config_of(path), lambda stage, fraction: None)
    more = WIDENED.get(type_name, 1.1)
    assert grouped_bytes(loaded) <= more * in_file
    pack_grouped_layers(loaded, kernels)
    assert grouped_bytes(loaded) == 0, "what was loaded is let go of"
    assert sum(module.packed.nbytes for module in loaded.modules() if hasattr(module, "packed")) <= more * in_file


def test_a_directory_with_one_gguf_file_names_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    (by_file, first), (by_directory, second) = (
        load_model(config_of(source), lambda stage, fraction: None) for source in (path, str(tmp_path))
    )
    assert first == second
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelRefusedError, match=r"holds 2 GGUF files \(other.gguf, tiny.gguf\): name one"):
        load_model(config_of(str(tmp_path)), lambda stage, fraction: None)


def test_a_gguf_model_in_several_files_is_the_model_of_one(tmp_path: Path) -> None:
    whole, _ = load_model(config_of(write_gguf(tmp_path / "tiny.gguf", "IQ4_XS")), lambda stage, fraction: None)
    write_gguf(tmp_path / "parts" / "tiny.gguf", "IQ4_XS", max_tensors=7)
    loaded, info = load_model(config_of(str(tmp_path / "parts")), lambda stage, fraction: None)
    assert info.model_id == "tiny" and len(list((tmp_path / "parts").iterdir())) == 3
    for name, layer in loaded.named_modules():
        if isinstance(layer, (GroupedLinear, GroupedEmbedding)):
            assert torch.equal(layer.grouped.dequantised(), whole.get_submodule(name).grouped.dequantised()), name
    last = read_header(next((tmp_path / "parts").glob("*-00001-*"))).tensors[-1]
    content = bytearray(last.path.read_bytes())
    content[last.start + last.num_bytes - 1] ^= 1
    last.path.write_bytes(content)
    _, changed = load_model(config_of(str(tmp_path / "parts")), lambda stage, fraction: None)
    assert changed.weights_fingerprint != info.weights_fingerprint, "the fingerprint covers every part"


def test_a_missing_part_of_a_gguf_model_is_rejected_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", max_tensors=7)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelRefusedError, match=r"1 of 3 parts are missing: tiny-00002-of-00003.gguf"):
        load_model(config_of(str(tmp_path)), lambda stage, fraction: None)


def test_gguf_files_of_other_weights_have_other_fingerprints(tmp_path: Path) -> None:
    fingerprints = set()
    for name, type_name in (("a", "Q4_1"), ("b", "Q4_1"), ("c", "Q4_0")):
        path = write_gguf(tmp_path / f"{name}.gguf", type_name)
        fingerprints.add(load_model(config_of(path), lambda stage, fraction: None)[1].weights_fingerprint)
    assert len(fingerprints) == 2


def test_the_first_layers_of_a_gguf_file_can_be_loaded_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model=tiny_model(num_layers=3))
    runner = load_runner(config_of(path, num_layers=1))
    theirs = of_transformers(path)
    theirs.model.layers = theirs.model.layers[:1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([SEQUENCES[0]]), use_cache=False).logits[0]
    assert (forward_together(runner, SEQUENCES[:1])[0] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_compiled_layers_of_a_gguf_file_are_joined_and_give_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model=tiny_model(num_layers=1))
    num_joined: list[int] = []
    join = compiled_forward.join_linears
    monkeypatch.setattr(compiled_forward, "join_linears", lambda graph, model: num_joined.append(join(graph, model)))
    eager = load_runner(config_of(path, "bfloat16"))
    compiled = load_runner(EngineConfig(path, dtype="bfloat16", num_pages=32, compile="on"))
    assert compiled.is_compiled and num_joined == [2], "query, key, value; gate, up"
    for left, right in zip(forward_together(eager, SEQUENCES), forward_together(compiled, SEQUENCES), strict=True):
        assert (left.float() - right.float()).abs().mean() < 0.02 * left.float().abs().mean()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"rope.scaling.type = 'yarn' is not supported, factor None"),
        ({"llama.rope.scaling.type": "su"}, r"rope.scaling.type = 'su' is not supported"),
        ({"llama.attention.key_length": 32}, r"llama.rope.dimension_count = 64 is not read"),
        ({"llama.attention.value_length": 32}, r"llama.attention.value_length = 32 is not read"),
        ({"llama.attention.sliding_window": 32}, r"llama.attention.sliding_window = 32 is not read"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"llama.attention.head_count_kv: a list, one value for each"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"'blk.0.ffn_gate.weight' has no place in Mixtral"),
        ({"tokenizer.ggml.pre": "viking"}, r"tokenizer.ggml.pre: 'viking' is none of"),
        ({"llama.embedding_length": 512}, r"tensor '.*' has shape \[.*, 256\], not \[.*, 512\]"),
    ],
)
def test_gguf_settings_that_would_be_another_model_are_rejected(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises(ModelRefusedError, match=reason):
        load_runner(config_of(path))


def test_gguf_settings_without_effect_are_accepted(tmp_path: Path) -> None:
    neutral = {"llama.rope.scaling.type": "none", "llama.attention.key_length": 64, "llama.expert_count": 0}
    load_runner(config_of(write_gguf(tmp_path / "tiny.gguf", changes=neutral)))


def test_an_unknown_tensor_of_a_gguf_file_is_rejected(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **{"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelRefusedError, match="tensor 'blk.0.attn_sinks.weight' has no place in LlamaForCausalLM"):
        load_runner(config_of(path))


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        (np.ones(31, np.float32), "31 factors of frequencies, not 32"),
        (np.ones((32, 1), np.float32), r"'rope_freqs.weight', F32 \[32, 1\]: no row of F32"),
        (np.zeros(32, np.float32), "'rope_freqs.weight': a factor is not a finite number above 0"),
        (np.full(32, np.nan, np.float32), "'rope_freqs.weight': a factor is not a finite number above 0"),
    ],
)
def test_invalid_frequency_factors_are_rejected(factors: Any, reason: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **{"rope_freqs.weight": factors})
    with pytest.raises(ModelRefusedError, match=reason):
        load_model(config_of(path), lambda stage, fraction: None)


@pytest.mark.parametrize("type_name", sorted(GROUPED_TYPES))
def test_gguf_scales_that_are_not_finite_are_rejected(type_name: str, tmp_path: Path) -> None:
    path = Path(write_gguf(tmp_path / "tiny.gguf", type_name))
    tensor = next(tensor for tensor in read_header(path).tensors if tensor.name == "blk.1.ffn_up.weight")
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    if type_name == "IQ1_M":
        put_scattered(content[tensor.start : tensor.start + 56], np.array([np.nan], np.float16))
    else:
        nan = b"\xff" if type_name == "MXFP4" else np.float16(np.nan).tobytes()
        place = tensor.start + SCALES_AT.get(type_name, 0)
        content[place : place + len(nan)] = list(nan)
    path.write_bytes(content.tobytes())
    with pytest.raises(ModelRefusedError, match=rf"tensor 'blk.1.ffn_up.weight', {type_name}: scale.* not finite"):
        load_runner(config_of(str(path)))


def test_a_gguf_file_without_one_of_its_weights_is_rejected(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model=tiny_model(num_layers=1), changes={"llama.block_count": 2})
    with pytest.raises(ModelRefusedError, match=r"lacks 9 of the model's weights, as model.layers.1"):
        load_runner(config_of(path))
