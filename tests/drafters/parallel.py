"""PARD checkpoints for tests, and drafts as the paper defines them: whole forwards of the unchanged model."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from betoken.draft_worker.commands import Open
from betoken.draft_worker.core import DraftCore
from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.kernels import noise
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import PARAMS, RecordingSink, request
from tests.engine.tiny import save_tiny

MASK = 100
SAMPLINGS = {1: PARAMS[1], 2: PARAMS[2], 3: SamplingParams(temperature=0.8, seed=4, ignore_eos=True)}
"""Greedy until an end id, with rules and filters, and sampled without rules."""


def save_pard(folder, family="llama", **fields):
    """Write a tiny random PARD checkpoint; `fields` of its config.json. Return its directory."""
    directory = save_tiny(folder, family)
    config = Path(directory) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": MASK} | fields))
    return directory


class Reference:
    """The definition, arXiv:2504.18583: the model on the committed ids and K - 1 masks; its last K rows are the
    drafts."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def rows(self, ids, num_tokens):
        """Logits [K, V]."""
        padded = torch.tensor([[*ids, *[MASK] * (num_tokens - 1)]])
        return self.model(input_ids=padded, use_cache=False).logits[0, -num_tokens:].float()

    def draft(self, ids, num_tokens, params, num_prompt):
        """The ids of a draft: each row's own token by the target's rule, logits + T * noise(seed, position, id)."""
        draft = []
        for place, logits in enumerate(self.rows(ids, num_tokens)):
            if params.has_rules:
                group = SampleGroup(params, ids[:num_prompt], [*ids[num_prompt:], *draft], ())
                token_id = choose_tokens(logits[None], [group]).token_ids[0]
            else:
                perturbation = noise.gumbel([params.seed], [len(ids) + place], len(logits))[0]
                token_id = int((logits + params.temperature * perturbation).argmax())
            draft.append(token_id)
            if token_id in params.eos_token_ids and not params.ignore_eos:
                break
        return draft


class RealBench:
    """A core with one PARD drafter of a checkpoint."""

    def __init__(self, directory, num_pages=200, max_rows=24, **options):
        self.runner = load_runner(
            EngineConfig(directory, **{"dtype": "float32", "num_pages": num_pages, "compile": "off"} | options)
        )
        self.sink, self.num_forwards = RecordingSink(), 0
        mask_token_id = self.runner.info.mask_token_id
        self.model = ModelDrafter(self.runner, max_rows, 8, mask_token_id=mask_token_id)
        self.core = DraftCore({"model": self.model}, [self.runner.page_table], self.sink, 8)

    def open(self, n, ids, num_prompt, params, wants_probs=False, **settings):
        texts = (tuple(ids[:num_prompt]), tuple(ids[num_prompt:]))
        self.core.apply(Open((1, n), params, *texts, 600, settings=settings, wants_probs=wants_probs))

    def draft(self, sizes, takes_trees=False):
        """Drafts by sequence, for a number of tokens each; all are requested at once."""
        self.sink.answers.clear()
        for n, num_tokens in sizes.items():
            self.core.apply(request(self.core, n, num_tokens, 0, takes_trees))
        self.num_forwards = 0
        while self.core.has_work:
            self.core.step()
            self.num_forwards += 1
            self.core.check_integrity()
        assert not self.sink.failures
        return {answer.key[1]: answer.drafted for answer in self.sink.answers}

    def free_everything(self):
        self.core.apply(CloseLink(1))
        assert self.runner.page_table.num_free == self.runner.page_table.num_pages
