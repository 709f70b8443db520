"""Gemma-4 assistants that do not fit, or are damaged, are refused in one line that names the field."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.gemma4_assistant.checkpoint import load_assistant
from betoken.drafters.gemma4_assistant.hosting import make_drafter
from betoken.drafters.gemma4_assistant.shape import read_shape
from betoken.drafters.side.files import TargetShape
from betoken.engine.errors import ModelRefusedError
from betoken.engine.kv_pool import KvPool, LayerShape
from tests.drafters.gemma4_assistant.tiny import config_of, save_assistant, tensors_of

TARGET = TargetShape("tiny", vocab_size=100, hidden_size=64, num_layers=4)
ORDERING = "masked_embedding.token_ordering"


def changed(config=None, text=(), **fields):
    config = copy.deepcopy(config or config_of())
    if "text_config" not in fields:
        config["text_config"] |= dict(text)
    return config | fields


def test_a_gemma4_assistant_is_what_was_saved(tmp_path):
    config = config_of(num_centroids=20)
    model = load_assistant(save_assistant(tmp_path, config), TARGET, torch.float32)
    stored = {name.removeprefix("model."): tensor for name, tensor in tensors_of(config).items()}
    assert torch.equal(model.members.flatten(), stored.pop(ORDERING))
    torch.testing.assert_close(dict(model.state_dict()), stored)
    assert (model.shape.num_centroids, model.shape.top_centroids, model.shape.target_hidden_size) == (20, 5, 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(model_type="gemma4"), "model_type: 'gemma4': must be one of gemma4_assistant, gemma4_unified_ass"),
        (changed(model_type=[]), r"model_type: \[\]: must be one of"),
        (changed(text_config=None), "text_config: None: must be an object"),
        (changed(text={"model_type": "llama"}), "text_config.model_type: 'llama': must be 'gemma4_text'"),
        (changed(backbone_hidden_size=96), "backbone_hidden_size: 96: must be 64, the target's hidden_size"),
        (changed(backbone_hidden_size=None), "backbone_hidden_size: None: must be an integer"),
        (changed(tie_word_embeddings=False), "tie_word_embeddings: False: must be true"),
        (changed(text={"vocab_size": 120}), "vocab_size: 120: must be 100, the target's"),
        (changed(text={"hidden_size_per_layer_input": 16}), "hidden_size_per_layer_input: 16: must be 0"),
        (changed(text={"enable_moe_block": True}), "enable_moe_block: True: must be False"),
        (changed(text={"use_double_wide_mlp": True}), "use_double_wide_mlp: True: must be False"),
        (changed(text={"attention_bias": True}), "attention_bias: True: must be False"),
        (changed(text={"hidden_activation": "relu"}), "hidden_activation: 'relu': must be 'gelu_pytorch_tanh'"),
        (changed(text={"use_bidirectional_attention": "all"}), "use_bidirectional_attention: 'all': must be None"),
        (changed(quantization_config={"bits": 4}), "quantization_config: {'bits': 4}: must be None"),
        (changed(text={"num_kv_shared_layers": 1}), "num_kv_shared_layers: 1: must be num_hidden_layers = 3"),
        (changed(text={"num_hidden_layers": 4, "num_kv_shared_layers": 4}), "text_config: .*layer_types. .3"),
        (changed(text={"layer_types": ["linear_attention"] * 2 + ["full_attention"]}), "layer_types: "),
        (changed(text={"rope_parameters": {}}), "rope_parameters.full_attention.rope_type: None: must be one of"),
        (changed(text={"sliding_window": 0}), "sliding_window: 0: must be at least 1"),
        (changed(text={"head_dim": 7}), "head_dim: 7: must be even"),
        (changed(text={"hidden_size": "wide"}), "hidden_size: 'wide': must be an integer of at least 1"),
        (changed(text={"rms_norm_eps": "x"}), "text_config: .*rms_norm_eps"),
        (changed(text={"num_attention_heads": 0}), "num_attention_heads: 0: must be an integer of at least 1"),
        (changed(config_of(num_centroids=30)), "num_centroids: 30: must divide vocab_size = 100"),
        (changed(config_of(num_centroids=20), centroid_intermediate_top_k=21), "centroid_intermediate_top_k: 21: must"),
        (changed(config_of(num_centroids=20), use_ordered_embeddings=False), "token_ordering: must be absent"),
        (changed(use_ordered_embeddings=True, num_centroids=20), "token_ordering: must be there"),
        (changed(text={"hidden_size": 1 << 40}), "text_config.hidden_size = 1099511627776: must be at most"),
        (changed(text={"intermediate_size": 64}), r"mlp.\w+.weight: \[.*\]: must be \["),
    ],
)
def test_a_gemma4_assistant_that_is_not_supported_is_refused_in_one_line(tmp_path, config, message):
    directory = save_assistant(tmp_path, config, tensors_of(config_of(num_centroids=20 * ("absent" in message))))
    with pytest.raises(ModelRefusedError, match=message) as caught:
        load_assistant(directory, TARGET, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"pre_projection.weight": None}, "pre_projection.weight and 0 more of its weights are not there"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.zeros(2)}, "k_proj.weight and 0 more are weights that"),
        ({"model.norm.weight": torch.zeros(8)}, r"norm.weight: \[8\]: must be \[32\]"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, "norm.weight: torch.int8: must be a floating"),
        ({ORDERING: torch.arange(100).float()}, r"token_ordering: \[100\]: must be \[100\] integers"),
        ({ORDERING: torch.arange(99)}, r"token_ordering: \[99\]: must be \[100\] integers"),
        ({ORDERING: torch.arange(100) // 2}, "token_ordering: must hold each id below 100 once"),
    ],
)
def test_damaged_weights_of_a_gemma4_assistant_are_refused(tmp_path, tensors, message):
    config = config_of(num_centroids=20)
    stored = {name: tensor for name, tensor in (tensors_of(config) | tensors).items() if tensor is not None}
    with pytest.raises(ModelRefusedError, match=message):
        load_assistant(save_assistant(tmp_path, config, stored), TARGET, torch.float32)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_an_invalid_config_of_a_gemma4_assistant_is_rejected(tmp_path, content):
    directory = save_assistant(tmp_path)
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelRefusedError, match="config.json"):
        load_assistant(directory, TARGET, torch.float32)


def target_of(text, **heads):
    shapes = {0: LayerShape(2, 16, 16), 1: LayerShape(2, 32, 32)} | {int(name[1:]): heads[name] for name in heads}
    pool = KvPool(shapes, 1, 4, torch.float32, torch.device("cpu"))
    config = SimpleNamespace(**{"model_type": "gemma4_text", "num_kv_shared_layers": 2} | text)
    parts = SimpleNamespace(config=config, pool=pool, hidden_size=64, num_layers=4, dtype=torch.float32)
    return SimpleNamespace(parts=parts, info=SimpleNamespace(model_id="tiny", vocab_size=100))


@pytest.mark.parametrize(
    ("text", "heads", "message"),
    [
        ({"model_type": "llama"}, {}, "model_type: 'llama': must be one of gemma4_text, gemma4_unified_text, for the"),
        (
            {"layer_types": ["full_attention"] * 4},
            {},
            "layer_types: .sliding_attention.: must be one of the",
        ),
        ({}, {"l0": LayerShape(1, 16, 16)}, "num_key_value_heads: 2: must be 1, as in the target's sliding_attention"),
        ({}, {"l1": LayerShape(2, 64, 64)}, "head_dim: 32: must be 64, as in the target's full_attention layers"),
    ],
)
def test_a_target_whose_keys_an_assistant_cannot_read_is_refused(tmp_path, text, heads, message):
    text = {"layer_types": ["sliding_attention", "full_attention"] * 2} | text
    settings = SimpleNamespace(gemma4_assistant=str(save_assistant(tmp_path)))
    with pytest.raises(FailedPreconditionError, match=f"--gemma4-assistant = .*{message}"):
        make_drafter(SimpleNamespace(settings=settings, target=target_of(text, **heads)))


def test_query_heads_of_an_assistant_are_a_multiple_of_the_targets_key_heads():
    shape = read_shape(changed(text={"num_attention_heads": 3}))
    with pytest.raises(ModelRefusedError, match="num_attention_heads: 3: must be a multiple of 2, the target's key"):
        shape.check_target("full_attention", 2, 32)


def test_a_config_of_a_gemma4_assistant_may_leave_out_defaults(tmp_path):
    config = changed()
    for name in ("rope_parameters", "hidden_size_per_layer_input", "num_kv_shared_layers", "hidden_activation"):
        del config["text_config"][name]
    model = load_assistant(save_assistant(tmp_path, config), TARGET, torch.bfloat16)
    assert model.shape.text.rope_parameters["full_attention"]["rope_type"] == "proportional"
    assert json.loads((tmp_path / "config.json").read_text()) == config
