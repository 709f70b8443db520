"""Gemma-4 assistants over the target's pages draft what transformers does."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.drafters.drafter import DraftTerms
from betoken.drafters.gemma4_assistant.hosting import make_drafter
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.sampling import SamplingParams
from tests.drafters.gemma4_assistant.tiny import config_of, save_assistant, save_target
from tests.drafters.rig import GREEDY, Rig, ids_of

VARIANTS = {
    "gemma4": ("gemma4_text", 2, Gemma4AssistantForCausalLM, config_of()),
    "ordered": ("gemma4_text", 2, Gemma4AssistantForCausalLM, config_of(num_centroids=20)),
    "unshared": ("gemma4_text", 0, Gemma4AssistantForCausalLM, config_of()),
    "unified": ("gemma4_unified_text", 2, Gemma4UnifiedAssistantForCausalLM, config_of("gemma4_unified_assistant")),
}


def load(folder, kind="gemma4_text", num_shared=2):
    path = save_target(folder / "target", kind, num_shared=num_shared)
    return load_runner(
        EngineConfig(
            path, dtype="float32", num_pages=400, page_size=4, compile="off", feature_layers=lambda num: (num,)
        )
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(tmp_path_factory.mktemp("gemma"))


class AssistantRig(Rig):
    """An assistant from a tiny checkpoint, and the target whose states and pages it reads."""

    def __init__(self, target, folder, config=None):
        settings = SimpleNamespace(gemma4_assistant=str(save_assistant(folder, config)))
        super().__init__(target, make_drafter(SimpleNamespace(settings=settings, target=target)), None)
        self.pages = {}

    def states_of(self, ids):
        page_ids, _ = self.target.page_table.allocate(ids)
        self.pages[tuple(ids)] = page_ids
        return self.target.forward([Segment(page_ids, 0, ids, 1)]).features.clone()

    def open(self, prompt_ids, params=GREEDY, **fields):
        def target_kv():
            page_ids = self.pages.get(tuple(seq.ids), ())
            return page_ids, len(seq.ids) - 1 if page_ids else 0

        seq = super().open(prompt_ids, params, **{"target_kv": target_kv} | fields)
        return seq


def kv_sharing_modes(config):
    """In 5.23 the models of transformers cannot be made: a property refuses layers that all read shared keys, and it
    has a target without shared keys hand over none."""
    num_own = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: layer for layer, kind in enumerate(config.layer_types[:num_own])}
    own = ["store" if layer in last.values() else None for layer in range(num_own)]
    return [*own, *["reuse"] * config.num_kv_shared_layers]


class Reference:
    """transformers' target, assistant and generator of candidates."""

    def __init__(self, target, folder, model):
        self.target = AutoModelForCausalLM.from_pretrained(target.info.path, dtype=torch.float32).eval()
        self.assistant, report = model.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(report.values()), report
        self.assistant.eval()

    def draft(self, ids, num_tokens):
        generator = SinglePositionMultiTokenCandidateGenerator(
            self.assistant, self.target.get_input_embeddings(), GenerationConfig(max_length=600)
        )
        generator.num_assistant_tokens = num_tokens
        known = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": False}
        with torch.no_grad():
            outputs = self.target(torch.tensor([ids[:-1]]), **known)
            candidates, _ = generator.get_candidates(
                torch.tensor([ids]), {}, outputs, is_first_iteration=False, n_last_matches=0
            )
        return candidates[0, len(ids) :].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_assistant_drafts_equal_those_of_transformers_step_by_step(target, tmp_path, variant, monkeypatch):
    """Texts are shorter and longer than the window of 9."""
    kind, num_shared, model, config = VARIANTS[variant]
    if variant in ("unshared", "unified"):
        target = load(tmp_path, kind, num_shared)
    rig = AssistantRig(target, tmp_path / "assistant", config)
    for changed in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
        monkeypatch.setattr(changed, "kv_sharing_modes", property(kv_sharing_modes))
    reference = Reference(target, tmp_path / "assistant", model)
    seqs = [rig.open(ids_of(seed, 4 + 13 * seed)) for seed in range(3)]
    rig.send(seqs)
    for accepted in ([7], [3, 4, 5, 6], [9, 9]):
        for seq, drafted in zip(seqs, rig.draft(seqs, 5), strict=True):
            assert drafted.draft_ids == reference.draft(seq.ids, 5)
            assert (drafted.parents, drafted.num_forwards) == (None, 5)
            rig.commit(seq, accepted)


def test_a_preempted_sequence_drafts_once_its_kv_is_computed_again(target, tmp_path):
    rig = AssistantRig(target, tmp_path)
    seq = rig.open(ids_of(4, 20))
    assert rig.draft([seq])[0].draft_ids == []
    rig.send([seq])
    before = rig.draft([seq])[0].draft_ids
    target.page_table.release(rig.pages.pop(tuple(seq.ids)))
    assert (len(before), rig.draft([seq])[0].draft_ids) == (6, [])
    rig.send([rig.open(ids_of(5, 30))])  # takes the pages
    rig.send([seq], 8)
    assert rig.draft([seq])[0].draft_ids == before


def test_a_draft_that_tokens_depend_on_waits_for_the_kv_of_a_preempted_sequence(target, tmp_path):
    rig = AssistantRig(target, tmp_path)
    seq = rig.open(ids_of(6, 20), draft_affects_output=True)
    rig.send([seq])
    assert rig.draft([seq])[0].draft_ids == []  # it may be requested before or after the prompt is computed
    rig.commit(seq, [5])
    pages = rig.pages.pop(tuple(seq.ids))
    rig.drafter.request(seq, 4)
    assert rig.drafter.step() == [] and rig.drafter.has_work
    rig.pages[tuple(seq.ids)] = pages
    (drafted,) = rig.drafter.step()
    assert len(drafted.draft_ids) == 4 and not rig.drafter.has_work


def test_an_assistant_drafts_as_many_tokens_as_requested_and_none_after_an_end_id(target, tmp_path):
    rig = AssistantRig(target, tmp_path)
    seq = rig.open(ids_of(7, 12))
    rig.send([seq])
    ids = rig.draft([seq])[0].draft_ids
    assert len(ids) == 6 and rig.draft([seq], 2)[0].draft_ids == ids[:2]
    ending = rig.open(seq.ids, SamplingParams(temperature=0.0, eos_token_ids=(ids[1],)), settings={"max_depth": "3"})
    rig.send([ending])
    assert rig.draft([ending])[0].draft_ids == ids[: ids.index(ids[1]) + 1]
    seq.terms = DraftTerms(8, 0.999)
    assert rig.draft([seq])[0].draft_ids == []
    with pytest.raises(InvalidArgumentError, match="max_depth"):
        rig.open(ids_of(8, 12), settings={"max_depth": "65"})


def test_for_rejection_tokens_of_an_assistant_come_with_their_distributions(target, tmp_path):
    rig = AssistantRig(target, tmp_path, config_of(num_centroids=20))
    seq = rig.open(ids_of(9, 9), SamplingParams(temperature=0.9, seed=5), wants_probs=True)
    rig.send([seq])
    (drafted,) = rig.draft([seq], 4)
    assert len(drafted.draft_probs) == len(drafted.draft_ids) == 4
    for token_id, sparse in zip(drafted.draft_ids, drafted.draft_probs, strict=True):
        assert token_id in sparse.token_ids and len(sparse.token_ids) <= 25 and sum(sparse.probs) == pytest.approx(1.0)


def test_an_assistant_refuses_a_sequence_whose_target_kv_it_cannot_read(target, tmp_path):
    rig = AssistantRig(target, tmp_path)
    with pytest.raises(FailedPreconditionError, match="gemma4_assistant needs a sequence whose KV"):
        rig.open(ids_of(10, 9), target_kv=None)
