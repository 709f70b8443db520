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

from tests.drafters.mtp.rig import DEPTH, PROMPT, Rig
from tests.drafters.mtp.tiny import CONFIGS, save_target


class Reference:
    """The target and its MTP layer by transformers alone, in float32."""

    def __init__(self, path):
        self.target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = self.target.config
        config.num_mtp_layers = 1
        is_sliding, is_mimo = config.model_type in ("mellum", "mimo_v2_flash"), config.model_type == "mimo_v2_flash"
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = ["sliding_attention" if is_sliding else "full_attention"]
        if getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = ["dense" if is_mimo else "sparse"]
        self.target._keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"model\.layers\.2\."]
        self.layer = self._mimo(path) if is_mimo else MtpModel.from_pretrained(self.target)

    def _mimo(self, path):
        """Transformers has the modules, but does not know the names of this layout."""
        layer, prefix = MtpModel(self.target, 1).eval(), "model.mtp.layers.0."
        own = {"eh_proj", "enorm", "hnorm", "final_layernorm"}
        for name, tensor in load_file(path / "model.safetensors").items():
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                name = name if name.split(".")[0] in own else f"mtp_block.{name}"
                for published, plain in (
                    ("final_layernorm", "post_norm"),
                    ("pre_mlp_layernorm", "post_attention_layernorm"),
                    ("attention_sink_bias", "sinks"),
                ):
                    name = name.replace(published, plain)
                layer.layers[0].get_parameter(name).data.copy_(tensor)
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
