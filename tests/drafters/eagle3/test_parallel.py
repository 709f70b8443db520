"""P-EAGLE layers over pages, batches and verification results draft what the definition does."""

import pytest
import torch

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.eagle3.checkpoint import load_layer
from betoken.drafters.eagle3.forward import LayerForward
from betoken.drafters.eagle3.parallel import ParallelEagleDrafter
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.page_table import PageTable
from tests.drafters.dflash.reference import rms_norm, rotate
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.drafters.rig import Rig, ids_of
from tests.engine.tiny import save_tiny

TARGET = TargetShape("tiny", vocab_size=101, hidden_size=64, num_layers=2)
STATES = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("target"), "llama")
    return load_runner(
        EngineConfig(model=path, dtype="float32", num_pages=64, compile="off", feature_layers=lambda num: STATES)
    )


class ParallelRig(Rig):
    """Layers from a tiny checkpoint, and the target whose states they receive."""

    def __init__(self, target, folder, layout="speculators", num_layers=3, max_rows=64):
        shape = tiny_shape(hidden_size=64, state_layers=STATES, num_layers=num_layers, mask_token_id=100)
        layer = tiny_layer(shape, spread=0.15)
        self.shape, self.weights = shape, {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        loaded = load_layer(save_layer(folder / "layers", layer, layout), TARGET)
        table = PageTable(64, 4, prefix_caching=True)
        forward = LayerForward(loaded, target.parts, 64, 4)
        pages = SharedPages(table, idle_grace_s=0.0)
        super().__init__(target, ParallelEagleDrafter(forward, pages, STATES, 101, max_rows), table)

    def literal(self, ids, num_tokens, first=0):
        """Greedy ids of one pass over the text from `first` on, with masks behind."""
        w, eps, embedding = self.weights, self.shape.rms_norm_eps, self.target.parts.embed(torch.arange(101))
        states = self.states_of(ids)[first:-1].flatten(1)
        states = torch.cat([states, w["mask_hidden"][0].expand(num_tokens - 1, -1)])
        embedded = embedding[torch.tensor(ids[first + 1 :] + [100] * (num_tokens - 1))]
        hidden = states @ w["fc.weight"].T
        normed = rms_norm(hidden, w["midlayer.hidden_norm.weight"], eps)
        x = torch.cat([rms_norm(embedded, w["midlayer.input_layernorm.weight"], eps), normed], -1)
        x = self.rest_of_layer("midlayer.", x, hidden)
        for layer in range(1, self.shape.num_layers):
            name = f"layers.{layer}."
            x = self.rest_of_layer(name, rms_norm(x, w[name + "input_layernorm.weight"], eps), x)
        logits = rms_norm(x, w["norm.weight"], eps)[-num_tokens:] @ w["lm_head.weight"].T
        return [int(i + w["d2t"][i]) for i in logits.argmax(-1)]

    def rest_of_layer(self, name, x, residual):
        w, shape = self.weights, self.shape
        q, k, v = (
            (x @ w[f"{name}self_attn.{kind}_proj.weight"].T).unflatten(-1, (-1, shape.head_dim)) for kind in "qkv"
        )
        positions = torch.arange(len(x))
        q, k = rotate(q, positions, 10000.0), rotate(k, positions, 10000.0)
        k, v = (rows.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_dim**0.5
        scores = scores.masked_fill(positions[None] > positions[:, None], -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = residual + mixed @ w[name + "self_attn.o_proj.weight"].T
        normed = rms_norm(x, w[name + "post_attention_layernorm.weight"], shape.rms_norm_eps)
        gate, up = (normed @ w[f"{name}mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        return x + (gate * torch.sigmoid(gate) * up) @ w[name + "mlp.down_proj.weight"].T


@pytest.mark.parametrize(("layout", "num_layers"), [("speculators", 3), ("specforge", 1)])
def test_parallel_eagle_drafts_equal_the_literal_definition(target, tmp_path, layout, num_layers):
    rig = ParallelRig(target, tmp_path, layout, num_layers)
    seqs = [rig.open(ids_of(seed, 5 + 9 * seed)) for seed in range(3)]
    rig.send(seqs)
    for accepted in ([7], [3, 4, 5, 6], [9, 9]):
        for seq, drafted in zip(seqs, rig.draft(seqs, 5), strict=True):
            assert drafted.draft_ids == rig.literal(seq.ids, 5)
            rig.commit(seq, accepted)


def test_parallel_eagle_drafts_follow_long_prompts_missing_states_and_unused_drafts(target, tmp_path):
    rig = ParallelRig(target, tmp_path, max_rows=16)
    long, late = rig.open(ids_of(5, 64)), rig.open(ids_of(6, 30))
    rig.send([long])
    rig.send([late], 12)
    for num_tokens in (5, 3):
        drafts = rig.draft([long, late], num_tokens)
        assert drafts[0].draft_ids == rig.literal(long.ids, num_tokens)
        assert drafts[1].draft_ids == rig.literal(late.ids, num_tokens, first=12)


def test_settings_of_parallel_eagle_are_read_and_rejected_by_name(target, tmp_path):
    rig = ParallelRig(target, tmp_path)
    seq = rig.open(ids_of(7, 12), settings={"max_depth": "2"})
    rig.send([seq])
    assert len(rig.draft([seq], 8)[0].draft_ids) == 2
    with pytest.raises(InvalidArgumentError, match="must be one of max_depth"):
        rig.open(ids_of(7, 12), settings={"max_branches": "3"})


def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path):
    layer = tiny_layer(tiny_shape(hidden_size=64, state_layers=STATES, mask_token_id=101))
    with pytest.raises(ModelRefusedError, match="mask_token_id: 101: must be below 101"):
        load_layer(save_layer(tmp_path, layer), TARGET)
