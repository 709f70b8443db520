"""PARD-2 checkpoints in the published layout for tests, and drafts as the paper defines them."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.pard.hosting import make_drafter, state_layers
from betoken.drafters.shared_pages import SharedPages
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from tests.drafters.parallel import MASK, Reference, save_pard
from tests.drafters.rig import GREEDY, Rig
from tests.engine.tiny import save_tiny

LAYERS = [-1, 1, 0, -1]
"""Entries of `output_hidden_states`, unordered and with one twice."""


def add_projection(directory, layers, hidden_size, target_size, has_bias=True, **fields):
    """Make a PARD-2 checkpoint of a PARD checkpoint; `fields` of its config.json."""
    dim = len(layers) * target_size
    config = Path(directory) / "config.json"
    of_pard2 = {"spd_type": "pard2", "pard2": True, "pard2_target_layers": layers, "pard2_target_dim": dim}
    of_pard2 |= {"pard2_scale": 0.05, "pard2_proj_bias": has_bias}
    config.write_text(json.dumps(json.loads(config.read_text()) | of_pard2 | fields))
    generator = torch.Generator().manual_seed(1)
    tensors = {"target_proj.weight": torch.randn(hidden_size, dim, generator=generator)}
    tensors |= {"target_proj.bias": torch.randn(hidden_size, generator=generator)} if has_bias else {}
    torch.save(tensors, Path(directory) / "warp_model.bin")
    return tensors


def save_pard2(folder, family="llama", has_bias=True, **fields):
    """Write a tiny random PARD-2 checkpoint for a target of 64 numbers a state; return its directory."""
    directory = save_pard(folder, family)
    add_projection(directory, LAYERS, 64, 64, has_bias, **fields)
    return directory


class Reference2(Reference):
    """The definition, arXiv:2605.08632: as `Reference`, with the target's states of the position before added to each
    embedding; masks repeat the last states."""

    def __init__(self, directory, target):
        super().__init__(directory)
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.tensors, self.num_unknown = torch.load(Path(directory) / "warp_model.bin", weights_only=True), 0
        self.config = json.loads((Path(directory) / "config.json").read_text())

    @torch.no_grad()
    def rows(self, ids, num_tokens):
        states = self.target(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer] for layer in self.config["pard2_target_layers"]], dim=-1)[0]
        weight, bias = self.tensors["target_proj.weight"], self.tensors.get("target_proj.bias")
        projected = torch.nn.functional.linear(features, weight, bias) * self.config["pard2_scale"]
        of_position = torch.cat((torch.zeros(1, projected.shape[1]), projected[:-1]))  # the position before
        of_position[: self.num_unknown + 1] = 0.0
        masks = of_position[-1:].expand(num_tokens - 1, -1)
        padded = torch.tensor([[*ids, *[MASK] * (num_tokens - 1)]])
        embedded = self.model.get_input_embeddings()(padded) + torch.cat((of_position, masks))
        return self.model(inputs_embeds=embedded, use_cache=False).logits[0, -num_tokens:].float()


class Pard2Rig(Rig):
    """A target, and a drafter that receives its states as a verify worker sends them."""

    def __init__(self, directory, target, num_pages=200, max_rows=24, dtype="float32"):
        names = {"pard": str(directory), "model": str(target), "revision": None}
        self.settings = SimpleNamespace(max_num_batched_tokens=max_rows, **names)
        layers = lambda num_layers: state_layers(self.settings, num_layers)  # noqa: E731
        options = {"dtype": dtype, "compile": "off"}
        runner = load_runner(EngineConfig(str(target), num_pages=200, feature_layers=layers, **options))

        def model(option, adds_to_embeddings):
            config = EngineConfig(directory, num_pages=num_pages, adds_to_embeddings=adds_to_embeddings, **options)
            self.draft_runner = load_runner(config)
            return self.draft_runner, SharedPages(self.draft_runner.page_table)

        host = SimpleNamespace(settings=self.settings, target=runner, max_prefill_tokens=8, model=model)
        super().__init__(runner, make_drafter(host), None)
        self.num_opened = 0

    def open(self, prompt_ids, params=GREEDY, output_ids=(), **fields):
        self.num_opened += 1
        seq = DraftSequence((0, self.num_opened), params, prompt_ids, list(output_ids), 600, **fields)
        self.drafter.open(seq)
        return seq

    def draft(self, seqs, num_tokens=8):
        for seq in seqs:
            self.drafter.request(seq, num_tokens)
        drafted = {}
        while self.drafter.has_work:
            drafted |= {id(answer.sequence): answer for answer in self.drafter.step()}
            self.drafter.check_integrity()
        return [drafted[id(seq)] for seq in seqs]


def save_both(folder, **fields):
    """A target and a PARD-2 checkpoint for it; their directories."""
    return save_tiny(folder / "target", "qwen3", seed=3), save_pard2(folder / "pard", **fields)
