"""Files in each published layout load as they are; what does not fit the target is refused by name."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from betoken.drafters.dflash.checkpoint import load_block
from betoken.drafters.side.files import TargetShape
from betoken.engine.errors import ModelRefusedError
from tests.drafters.dflash.tiny import FIELDS, save_block, tiny_shape, tiny_tensors

TARGET = TargetShape("tiny", vocab_size=101, hidden_size=64, num_layers=8, max_context=640)


def edit(directory, **fields):
    config = json.loads((directory / "config.json").read_text())
    for name, value in fields.items():
        (config["dflash_config"] if name in config.get("dflash_config", {}) else config)[name] = value
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("variant", "layout"), [*itertools.product(FIELDS, ("published", "speculators")), ("dflash", "transformers")]
)
def test_a_block_drafter_of_each_layout_is_what_was_saved(tmp_path, variant, layout):
    shape = tiny_shape(variant, state_layers=(1, 4, 8))
    loaded = load_block(save_block(tmp_path, shape, layout), TARGET)
    draft_vocab_size = 101 if layout == "speculators" else 0
    assert replace(loaded.shape, rope=shape.rope) == replace(shape, draft_vocab_size=draft_vocab_size)
    assert loaded.state_layers == (1, 4, 8)
    stored, own = tiny_tensors(shape), dict(loaded.model.state_dict())
    if loaded.embedding is not None:
        own["embed_tokens.weight"] = loaded.embedding
    own = {name.removesuffix(".weight") if "codebook" in name else name: tensor for name, tensor in own.items()}
    torch.testing.assert_close(own, stored)


def test_the_default_states_of_a_block_drafter_are_spread_over_the_targets_layers(tmp_path):
    shape = tiny_shape(num_layers=3, state_layers=(2, 4, 6))
    directory = save_block(tmp_path, shape)
    assert load_block(edit(directory, target_layer_ids=None), TARGET).state_layers == (2, 4, 6)


def test_a_draft_vocabulary_has_its_own_head_and_map(tmp_path):
    shape = tiny_shape(draft_vocab_size=40)
    tensors = tiny_tensors(shape) | {"lm_head.weight": torch.zeros(40, 64), "d2t": torch.arange(40)}
    tensors["t2d"] = torch.zeros(101, dtype=torch.bool)
    loaded = load_block(save_block(tmp_path, shape, "speculators", tensors), TARGET)
    assert (loaded.model.d2t.tolist(), loaded.model.lm_head.out_features) == (list(range(40)), 40)
    del tensors["d2t"]
    with pytest.raises(ModelRefusedError, match="d2t: must be there, as draft_vocab_size = 40 of 101"):
        load_block(save_block(tmp_path, shape, "speculators", tensors), TARGET)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_hidden_size": 96}, "hidden_size: 96: must be 64, the target's"),
        ({"vocab_size": 120}, "vocab_size: 120: must be 101, the target's"),
        ({"state_layers": (2, 9)}, r"target_layer_ids: \[1, 8\]: must be among -1 to 7"),
        ({"mask_token_id": 101}, "mask_token_id: 101: must be below 101"),
        ({"hidden_size": 32, "target_hidden_size": 64}, "embed_tokens.weight: must be there, .* 64 wide, not 32"),
        (
            {"window": 9},
            "sliding_window: 9: must be at least 640, the worker's --max-context",
        ),
    ],
)
def test_a_block_drafter_of_another_target_is_refused(tmp_path, fields, message):
    directory = save_block(tmp_path, tiny_shape(**fields))
    with pytest.raises(ModelRefusedError, match=message):
        load_block(edit(directory, target_hidden_size=fields.get("target_hidden_size", 64)), TARGET)


def test_a_block_drafter_made_for_another_base_is_refused(tmp_path):
    directory = save_block(tmp_path, tiny_shape(base="someone/Tiny"), "speculators")
    assert load_block(directory, TARGET).shape.base == "someone/Tiny"
    with pytest.raises(ModelRefusedError, match="base: 'someone/Tiny': must be 'other', the target"):
        load_block(directory, replace(TARGET, name="other"))


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        (
            "dflash",
            {"architectures": ["Gemma4DSparkModel"]},
            "architectures: 'Gemma4DSparkModel': must be one of ",
        ),
        ("dflash", {"architectures": [{}]}, "architectures: {}: must be one of"),
        ("dflash", {"speculators_model_type": "eagle3"}, "speculators_model_type: 'eagle3': must be 'dflash'"),
        ("dflash", {"model_type": "gemma4"}, "model_type: 'gemma4': must be one of qwen3"),
        ("dflash", {"hidden_act": "gelu"}, "hidden_act: 'gelu': must be 'silu'"),
        ("dflash", {"projector_type": "domino"}, "projector_type: 'domino': must be 'dflash'"),
        ("dflash", {"input_embedding_scale": 8.0}, "input_embedding_scale: 8.0: must be 1"),
        ("dflash", {"quantization_config": {"bits": 4}}, "quantization_config: must be absent"),
        ("dflash", {"dflash_config": []}, "dflash_config: must be an object"),
        ("dflash", {"block_size": 1}, "block_size: 1: must be an integer of at least 2"),
        ("dflash", {"mask_token_id": None}, "mask_token_id: None: must be an integer"),
        ("dflash", {"target_layer_ids": "1"}, "target_layer_ids: '1': must be a list of layers"),
        ("dflash", {"layer_types": ["full_attention", "chunked"]}, "layer_types: .*must be full_attention or sliding"),
        ("dflash", {"rope_parameters": 5}, "rope_parameters: 5: must be an object"),
        ("dflash", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: "),
        ("dflash", {"rms_norm_eps": "x"}, "rms_norm_eps: 'x': must be a number above 0"),
        ("dflash", {"head_dim": 16}, r"layers.0.self_attn.\w+.weight: \[.*\]: must be \["),
        ("dflash", {"num_key_value_heads": 3}, "num_key_value_heads: 3: must divide num_attention_heads = 4"),
        ("dflash", {"head_dim": 7}, "head_dim: 7: must be even"),
        ("dflash", {"num_hidden_layers": 3}, "layers.2.* and 10 more of its weights are not there"),
        ("dflash", {"num_hidden_layers": 1}, "layers.1.* and 10 more are weights that no dflash drafter has"),
        ("dflash2", {"selector_rank": 0}, "selector_rank: 0: must be an integer of at least 1"),
        ("dflash2", {"conv_group_size": 24}, "conv_group_size: 24: must divide 64"),
        ("dflash2", {"architectures": ["DFlashDraftModel"]}, "are weights that no dflash drafter has"),
        ("dspark", {"markov_head_type": "bigram"}, "markov_head_type: 'bigram': must be one of vanilla, gated, rnn"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head.joint_proj.bias and 1 more of its weights are not there"),
        ("dspark", {"markov_rank": 0}, "confidence_head_with_markov: True: must be false without markov_rank"),
    ],
)
def test_an_unsupported_setting_of_a_block_drafter_is_rejected_by_name(tmp_path, variant, fields, message):
    with pytest.raises(ModelRefusedError, match=message):
        load_block(edit(save_block(tmp_path, tiny_shape(variant)), **fields), TARGET)


@pytest.mark.parametrize("content", ["[]", "{", "", '{"hidden_size": 9999999999999}'])
def test_an_invalid_config_of_a_block_drafter_is_rejected(tmp_path, content):
    directory = save_block(tmp_path, tiny_shape())
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelRefusedError, match="config.json"):
        load_block(directory, TARGET)


def test_weights_of_another_type_are_refused(tmp_path):
    directory = save_block(tmp_path, tiny_shape())
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(torch.int8)}, directory / "model.safetensors")
    with pytest.raises(ModelRefusedError, match=r"fc.weight: torch.int8: must be a floating-point type"):
        load_block(directory, TARGET)
