"""Files in each published layout load as they are; what does not fit the target is refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from betoken.drafters.eagle3.checkpoint import load_layer
from betoken.drafters.side.files import TargetShape
from betoken.engine.errors import ModelRefusedError
from tests.drafters.eagle3.tiny import FLAGS, config_of, save_layer, tiny_layer, tiny_shape

TARGET = TargetShape("tiny", vocab_size=101, hidden_size=64, num_layers=8)
LAYOUTS = ("safeailab", "specforge", "prefixed", "speculators")
EMBEDDING = torch.arange(101 * 32, dtype=torch.float32).view(101, 32)


def saved(tmp_path, layout="specforge", embedding=EMBEDDING, **fields):
    return save_layer(tmp_path / layout, tiny_layer(tiny_shape(**fields)), layout, embedding)


def edit(directory, **fields):
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flags", [(), FLAGS], ids=["plain", "flags"])
def test_a_layer_of_each_layout_is_what_was_saved(tmp_path, layout, flags):
    shape = tiny_shape(**dict.fromkeys(flags, True), state_layers=(1, 4, 7))
    layer = tiny_layer(shape)
    loaded = load_layer(save_layer(tmp_path, layer, layout, EMBEDDING), TARGET)
    assert replace(loaded.shape, rope=shape.rope) == shape
    assert loaded.state_layers == (1, 4, 7)
    torch.testing.assert_close(loaded.embedding, EMBEDDING)
    torch.testing.assert_close(loaded.layer.state_dict(), layer.state_dict())


def test_the_default_feature_layers_are_the_papers(tmp_path):
    assert load_layer(saved(tmp_path), TARGET).state_layers == (2, 4, 5)


def test_a_layer_as_wide_as_the_target_may_use_its_embeddings(tmp_path):
    directory = saved(tmp_path, embedding=None, hidden_size=64)
    assert load_layer(directory, TARGET).embedding is None


@pytest.mark.parametrize("has_bias", [True, False])
def test_weights_of_first_generation_eagle_load(tmp_path, has_bias):
    shape = tiny_shape(version=1, hidden_size=64, has_fc_bias=has_bias, draft_vocab_size=101, num_states=1)
    layer = tiny_layer(shape)
    loaded = load_layer(save_layer(tmp_path, layer, "safeailab", torch.zeros(101, 64)), TARGET)
    assert (loaded.shape.version, loaded.state_layers) == (1, (8,))
    torch.testing.assert_close(loaded.layer.state_dict(), layer.state_dict())


def test_a_vocabulary_as_large_as_the_targets_needs_no_map(tmp_path):
    directory = saved(tmp_path, draft_vocab_size=101)
    tensors = load_file(directory / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, directory / "model.safetensors")
    assert load_layer(directory, TARGET).layer.d2t.tolist() == [0] * 101


def test_shards_of_an_eagle3_layer_are_read_together(tmp_path):
    directory = saved(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(load_layer(directory, TARGET).layer.state_dict()["fc.weight"], tensors["fc.weight"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_hidden_size": 96}, "target_hidden_size: 96: must be 64, the target's"),
        ({"vocab_size": 120}, "vocab_size: 120: must be 101, the target's"),
        ({"state_layers": (2, 4, 9)}, "eagle_aux_hidden_state_layer_ids: .*must be 3 of 0 to 8"),
    ],
)
def test_a_layer_of_another_target_is_refused(tmp_path, fields, message):
    with pytest.raises(ModelRefusedError, match=message):
        load_layer(saved(tmp_path, embedding=torch.zeros(fields.get("vocab_size", 101), 32), **fields), TARGET)


def test_a_layer_made_for_another_base_is_refused(tmp_path):
    shape = tiny_shape(base="someone/Tiny")
    directory = save_layer(tmp_path, tiny_layer(shape), "speculators", EMBEDDING)
    assert load_layer(directory, TARGET).shape.base == "someone/Tiny"
    with pytest.raises(ModelRefusedError, match="base: 'someone/Tiny': must be 'other', the target"):
        load_layer(directory, replace(TARGET, name="other"))


def test_a_narrow_layer_without_embeddings_is_refused(tmp_path):
    with pytest.raises(
        ModelRefusedError, match="embed_tokens.weight: must be there, as the target's .* 64 wide, not 32"
    ):
        load_layer(saved(tmp_path, embedding=None), TARGET)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type: 'dflash': must be 'eagle3' or 'peagle'"),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, "EAGLE-4 is not supported"),
        ({"parallel_drafting": True}, "ptd_token_id: None: must be an integer"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2: must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu': must be 'silu'"),
        ({"model_type": "gpt_oss"}, "model_type: 'gpt_oss': must be one of llama"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: must be absent"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic'"),
        ({"intermediate_size": 64}, r"midlayer.mlp.\w+.weight: \[.*48.*\]: must be \[.*64.*\]"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3: must divide num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim: 7: must be even"),
        ({"hidden_size": "32"}, "hidden_size: '32': must be an integer"),
        ({"fc_norm": True}, "fc_norm.0.weight and 2 more of its weights are not there"),
        ({"draft_vocab_size": 500}, "draft_vocab_size: 500: must be at most 101"),
    ],
)
def test_an_unsupported_setting_of_a_layer_is_rejected_by_name(tmp_path, fields, message):
    with pytest.raises(ModelRefusedError, match=message):
        load_layer(edit(saved(tmp_path), **fields), TARGET)


def test_weights_without_their_flag_are_refused(tmp_path):
    with pytest.raises(ModelRefusedError, match="fc_norm.0.weight and 2 more are weights no such layer has"):
        load_layer(edit(saved(tmp_path, fc_norm=True), fc_norm=False), TARGET)


@pytest.mark.parametrize(("offset", "message"), [(90, "an id is outside"), (-1, "two of the draft's ids are one")])
def test_an_invalid_vocabulary_map_is_rejected(tmp_path, offset, message):
    directory = saved(tmp_path, draft_vocab_size=40)
    tensors = load_file(directory / "model.safetensors")
    tensors["d2t"] = torch.zeros(40, dtype=torch.int64)
    tensors["d2t"][30] = offset
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelRefusedError, match=f"d2t: {message}"):
        load_layer(directory, TARGET)


def test_a_pickle_of_other_objects_is_not_run(tmp_path):
    directory = tmp_path / "evil"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_of(tiny_shape(), "safeailab")))
    owned = tmp_path / "owned"
    (directory / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {owned}'\ntR.".encode())
    with pytest.raises(ModelRefusedError, match="pytorch_model.bin: "):
        load_layer(directory, TARGET)
    assert not owned.exists()


@pytest.mark.parametrize("content", [b"", b"x" * 40, b"PK\x05\x06" + bytes(18), b"\x80\x02]q\x00.", b"\x80\x02."])
def test_an_invalid_pickle_is_rejected(tmp_path, content):
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_of(tiny_shape(), "safeailab")))
    (directory / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelRefusedError, match="pytorch_model.bin: ."):
        load_layer(directory, TARGET)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_an_invalid_config_of_a_layer_is_rejected(tmp_path, content):
    directory = saved(tmp_path)
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelRefusedError, match="config.json"):
        load_layer(directory, TARGET)
