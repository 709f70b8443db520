"""The drafter over pages, batches and verdicts drafts what transformers' own generator drafts from the same states."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from betoken.common.errors import InvalidArgumentError
from tests.drafters.mtp.rig import DEPTH, PROMPT, Rig
from tests.drafters.mtp.tiny import CONFIGS, save_target


class Reference:
    """The target and its MTP layers by transformers alone, in float32."""

    def __init__(self, path, num_layers=1):
        self.target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = self.target.config
        config.num_mtp_layers = num_layers
        is_sliding, is_mimo = config.model_type in ("mellum", "mimo_v2_flash"), config.model_type == "mimo_v2_flash"
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = ["sliding_attention" if is_sliding else "full_attention"] * num_layers
        if getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = ["dense" if is_mimo else "sparse"] * num_layers
        self.target._keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"model\.layers\.[234]\."]
        self.layer = self._mimo(path, num_layers) if is_mimo else MtpModel.from_pretrained(self.target)

    def _mimo(self, path, num_layers):
        """Transformers has the modules, but does not know the names of this layout."""
        layer, own = MtpModel(self.target, num_layers).eval(), {"eh_proj", "enorm", "hnorm", "final_layernorm"}
        for stored, tensor in load_file(path / "model.safetensors").items():
            if stored.startswith("model.mtp.layers."):
                index, name = stored.removeprefix("model.mtp.layers.").split(".", 1)
                name = name if name.split(".")[0] in own else f"mtp_block.{name}"
                for published, plain in (
                    ("final_layernorm", "post_norm"),
                    ("pre_mlp_layernorm", "post_attention_layernorm"),
                    ("attention_sink_bias", "sinks"),
                ):
                    name = name.replace(published, plain)
                layer.layers[int(index)].get_parameter(name).data.copy_(tensor)
        return layer

    @torch.inference_mode()
    def states(self, ids):
        """[n, H] after the final norm."""
        return self.target(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]

    @torch.inference_mode()
    def drafts(self, ids, depth):
        """By the definition: the layer's output is the state of the next position; everything is computed anew."""
        hidden, ids = self.states(ids[:-1])[None], list(ids)
        for _ in range(depth):
            rows = torch.tensor([ids[1:]])
            positions, cache = torch.arange(1, len(ids))[None], MtpCache(config=self.target.config.get_mtp_config())
            output = self.layer.forward_layer(0, hidden, positions, cache, input_ids=rows)[:, -1:]
            ids.append(int(self.target.lm_head(output).argmax()))
            hidden = torch.cat([hidden, output], dim=1)
        return ids[-depth:]

    def fresh(self, ids):
        """The draft of the generator for a text that it has not seen before."""
        return self.candidates(self.generator(), ids, len(ids) - 1)

    def generator(self):
        with mock.patch.object(MtpModel, "from_pretrained", lambda *args, **keywords: self.layer):
            return MTPCandidateGenerator(self.target, GenerationConfig(do_sample=False), {})

    def candidates(self, generator, ids, num_new):
        """The draft of the generator after the target has read `num_new` more tokens, without ids[-1]."""
        outputs = SimpleNamespace(hidden_states=[self.states(ids[:-1])[None, -num_new:]])
        positions = {"position_ids": torch.arange(len(ids))[None]}
        found, _ = generator.get_candidates(
            torch.tensor([ids]), positions, outputs, is_first_iteration=False, n_last_matches=num_new - 1
        )
        return found[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_mtp_drafts_are_those_of_transformers_generator_step_by_step(tmp_path, name):
    path = save_target(tmp_path, name)
    reference = Reference(path)
    rig, generator = Rig(path, reference), reference.generator()
    text = reference.target.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    text = text[0].tolist()
    seq, num_new = rig.open(text[: len(PROMPT) + 1]), len(PROMPT)
    for accepted in (1, 4, 2, 1, 5, 3):
        drafted = rig.draft(seq, DEPTH)
        assert drafted[:1] == reference.candidates(generator, seq.ids, num_new)
        assert drafted == reference.drafts(seq.ids, DEPTH)
        num_new = accepted
        rig.commit(seq, text[len(seq.ids) : len(seq.ids) + accepted])


@pytest.mark.parametrize("name", ["mimo_v2_flash", "deepseek_v3"])
def test_each_of_several_layers_drafts_its_token_as_in_transformers_generator(tmp_path, name):
    """A committed text ends with a token that was not drafted, whose rows all layers run again."""
    path = save_target(tmp_path, name, num_layers=3)
    reference = Reference(path, num_layers=3)
    rig, generator = Rig(path, reference), reference.generator()
    seq, num_new = rig.open([*PROMPT, 7]), len(PROMPT)
    for num_accepted in (1, 0, 3, 2, 0, 0, 1, 3):
        drafted = rig.draft(seq, DEPTH)
        assert len(drafted) == 3 and drafted == reference.candidates(generator, seq.ids, num_new)
        rig.commit(seq, [*drafted[:num_accepted], 50 + num_accepted])
        num_new = num_accepted + 1


def test_several_layers_draft_alike_after_short_drafts_and_from_pages_of_an_equal_text(tmp_path):
    path = save_target(tmp_path, "mimo_v2_flash", num_layers=3)
    reference = Reference(path, num_layers=3)
    rig = Rig(path, reference)
    first = rig.open([*PROMPT * 8, 7])
    assert rig.drafter.has_work and rig.drafter.step() == []  # takes the long prompt in
    for num_tokens, ids in ((1, [3, 9]), (0, [4]), (2, [50, 51, 52, 53])):
        drafted = rig.draft(first, num_tokens)
        assert drafted == reference.fresh(first.ids)[:num_tokens]
        rig.commit(first, ids)
    second = rig.open(list(first.ids))
    assert rig.draft(second, 3) == rig.draft(first, 3) == reference.fresh(first.ids)


def test_drafts_of_several_layers_are_chains(tmp_path):
    rig = Rig(path := save_target(tmp_path, "deepseek_v3", num_layers=2), Reference(path, 2), max_branches=2)
    with pytest.raises(InvalidArgumentError, match=r"max_branches.*must be one of max_depth"):
        rig.open(PROMPT)
