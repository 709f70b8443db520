"""The MTP layer of Nemotron-H drafts what its definition says, and a layer of other blocks is refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from betoken.drafters.mtp.checkpoint import MtpRefusedError, find_layers
from tests.drafters.mtp.rig import DEPTH, PROMPT, Rig
from tests.drafters.mtp.tiny import save_nemotron

NORMS = ("0.enorm", "0.hnorm", "1.final_layernorm")


class Definition:
    """u = P cat(N_e(E(next token)), N_h(h)), attention, experts, final norm: all by transformers' own blocks."""

    def __init__(self, path):
        self.target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = AutoConfig.from_pretrained(path)
        config.layers_block_type = ["full_attention", "moe"]
        config._attn_implementation = "eager"
        blocks = AutoModelForCausalLM.from_config(config).eval()
        stored = load_file(path / "model.safetensors")
        own = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
        self.special = {name: own.pop(f"mtp.layers.{name}.weight") for name in (*NORMS, "0.eh_proj")}
        self.blocks = blocks.get_decoder().layers
        state = {}
        for name, tensor in own.items():
            state[name.removeprefix("mtp.layers.")] = tensor
        for place in (0, 1):
            up, down = (
                [state.pop(f"{place}.mixer.experts.{e}.{kind}_proj.weight", None) for e in range(4)]
                for kind in ("up", "down")
            )
            if up[0] is not None:
                state[f"{place}.mixer.experts.up_proj"] = torch.stack(up)
                state[f"{place}.mixer.experts.down_proj"] = torch.stack(down)
        self.blocks.load_state_dict(state)
        self.epsilon = config.layer_norm_epsilon

    def norm(self, name, rows):
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.epsilon) * self.special[name]

    @torch.inference_mode()
    def states(self, ids):
        return self.target(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]

    @torch.inference_mode()
    def drafts(self, ids, depth):
        hidden, ids = self.states(ids[:-1]), list(ids)
        for _ in range(depth):
            embedded = self.target.get_input_embeddings()(torch.tensor(ids[1:]))
            rows = torch.cat([self.norm("0.enorm", embedded), self.norm("0.hnorm", hidden)], dim=-1)
            rows = (rows @ self.special["0.eh_proj"].T)[None]
            mask = torch.full((rows.shape[1], rows.shape[1]), -torch.inf).triu(1)[None, None]
            for block in self.blocks:
                rows = block(rows, attention_mask=mask)
            output = self.norm("1.final_layernorm", rows[0, -1:])
            ids.append(int(self.target.lm_head(output).argmax()))
            hidden = torch.cat([hidden, output])
        return ids[-depth:]


def test_nemotron_mtp_drafts_are_those_of_the_definition_step_by_step(tmp_path):
    path = save_nemotron(tmp_path)
    definition = Definition(path)
    rig = Rig(path, definition, max_depth=DEPTH)
    seq = rig.open(list(PROMPT))
    for accepted in (0, 2, 1, 3):
        draft = rig.draft(seq, DEPTH)
        assert draft == definition.drafts(seq.ids, DEPTH)
        rig.commit(seq, [*draft[:accepted], 7])


def test_a_nemotron_mtp_layer_of_other_blocks_is_refused_by_field_and_value(tmp_path):
    path = save_nemotron(tmp_path, mtp_layers_block_type=["full_attention", "mlp"])
    with pytest.raises(MtpRefusedError, match=r"mtp_layers_block_type: \['full_attention', 'mlp'\]: must be"):
        find_layers(str(path), None)[0]
