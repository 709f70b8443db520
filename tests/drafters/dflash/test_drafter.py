"""Block drafters over pages, batches and verification results draft what transformers and the definitions do."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.drafters.dflash.checkpoint import load_block
from betoken.drafters.dflash.drafter import DflashDrafter
from betoken.drafters.dflash.forward import BlockForward
from betoken.drafters.dflash.settings import DflashSettings
from betoken.drafters.drafter import DraftTerms
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.page_table import PageTable
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from tests.drafters.dflash.reference import LiteralBlock
from tests.drafters.dflash.tiny import save_block, tiny_shape, tiny_tensors
from tests.drafters.rig import Rig, ids_of
from tests.engine.cuda.harness import FakeRecorder
from tests.engine.tiny import save_tiny

TARGET = TargetShape("tiny", vocab_size=101, hidden_size=64, num_layers=2, max_context=640)
VARIANTS = {
    "dflash": {},
    "dflash/causal": {"is_causal": True, "window": 9},
    "dflash/capped": {"softcap": 2.0, "output_multiplier": 0.5},
    "dflash2": {},
    "dspark": {},
    "dspark/gated": {"markov_head_type": "gated", "confidence_reads_markov": False},
    "dspark/rnn": {"markov_head_type": "rnn", "has_confidence": False, "confidence_reads_markov": False},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("target"), "qwen3")
    return load_runner(
        EngineConfig(model=path, dtype="float32", num_pages=64, compile="off", feature_layers=lambda num: (1, 2))
    )


class BlockRig(Rig):
    """A drafter from a tiny checkpoint, and the target whose states it receives."""

    def __init__(
        self, target, folder, shape=None, num_pages=64, max_rows=64, layout="published", compiled=False, **tensors
    ):
        self.shape = shape or tiny_shape()
        self.folder, self.tensors = folder, tiny_tensors(self.shape) | tensors
        loaded = load_block(save_block(folder, self.shape, layout, self.tensors), TARGET)
        table = PageTable(num_pages, 4, prefix_caching=True)
        self.forward = BlockForward(loaded, target.parts, num_pages, 4)
        if compiled:
            self.forward.compile(folder / "cache")
        pages = SharedPages(table, idle_grace_s=0.0)
        drafter = DflashDrafter(self.forward, pages, (0, 1), 101, max_rows, DflashSettings())
        super().__init__(target, drafter, table)

    def literal(self, ids, first=0):
        """(ids, confidences) of the literal definition."""
        parts = self.target.parts
        reference = LiteralBlock(self.tensors, parts.embed(torch.arange(101)), self.head(), self.shape)
        return reference.draft(self.states_of(ids)[first:-1], ids[-1])

    def head(self):
        return self.target.parts.head(torch.eye(64)).T


def assert_is_literal(rig, seq, drafted, first=0):
    assert drafted.draft_ids == rig.literal(seq.ids, first)[0]


def test_dflash_drafts_equal_those_of_transformers_step_by_step(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", layout="transformers")
    shape = rig.shape
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-6, layer_types=["full_attention"] * 2, block_size=shape.block_size,
        mask_token_id=100, target_layer_ids=[0, 1], rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    assistant = MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assistant.load_state_dict({names.get(name, name): tensor for name, tensor in rig.tensors.items()})
    head = nn.Linear(64, 101, bias=False)
    head.weight = nn.Parameter(rig.head().contiguous())
    embedding = nn.Embedding.from_pretrained(target.parts.embed(torch.arange(101)).clone())
    generator = DFlashTokenCandidateGenerator(assistant, embedding, head, GenerationConfig(max_length=200))
    seq = rig.open(ids_of(1, 9))
    rig.send([seq])
    first, accepted = 0, []
    for accepted in ([7], [3, 4, 5, 6], [9, 9], []):
        states = rig.states_of(seq.ids)[first:-1]
        outputs = SimpleNamespace(hidden_states={1: states[None, :, 0], 2: states[None, :, 1]})
        places = {
            "position_ids": torch.arange(len(seq.ids))[None],
            "attention_mask": torch.ones(1, len(seq.ids), dtype=torch.int64),
        }
        with torch.no_grad():
            candidates, _ = generator.get_candidates(
                torch.tensor([seq.ids]), places, outputs, is_first_iteration=False, n_last_matches=len(states) - 1
            )
        assert rig.draft([seq])[0].draft_ids == candidates[0, len(seq.ids) :].tolist()
        first = len(seq.ids) - 1
        if accepted:
            rig.commit(seq, accepted)


@pytest.mark.parametrize("name", VARIANTS)
def test_block_drafts_of_each_variant_equal_the_literal_definition(target, tmp_path, name):
    rig = BlockRig(target, tmp_path / "block", tiny_shape(name.partition("/")[0], **VARIANTS[name]))
    seqs = [rig.open(ids_of(seed, 5 + 9 * seed)) for seed in range(3)]
    rig.send(seqs)
    for accepted in ([7], [3, 4, 5, 6], [9, 9]):
        for seq, drafted in zip(seqs, rig.draft(seqs), strict=True):
            assert_is_literal(rig, seq, drafted)
            rig.commit(seq, accepted)


def test_a_compiled_block_drafter_drafts_the_literal_block(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", tiny_shape("dflash2"), compiled=True)
    assert rig.forward.is_compiled
    seqs = [rig.open(ids_of(seed, 9)) for seed in range(2)]
    rig.send(seqs)
    for seq, drafted in zip(seqs, rig.draft(seqs), strict=True):
        assert_is_literal(rig, seq, drafted)


def test_a_recorded_block_drafter_drafts_the_literal_block(target, tmp_path, monkeypatch):
    """Blocks are padded with other rows to the size of a recording."""
    monkeypatch.setattr("betoken.engine.side.forward.load_cpu_kernels", lambda cache_dir: None)
    rig, recorder = BlockRig(target, tmp_path / "block", tiny_shape("dflash2")), FakeRecorder()
    rig.forward._forward.record(rig.forward._make_inputs, 32, 64, recorder)
    seqs = [rig.open(ids_of(seed, 9)) for seed in range(2)]
    rig.send(seqs)
    for accepted in ([7], [3, 4]):
        for seq, drafted in zip(seqs, rig.draft(seqs), strict=True):
            assert_is_literal(rig, seq, drafted)
            rig.commit(seq, accepted)
    assert len(recorder.replayed) == 2


def test_tokens_of_a_draft_vocabulary_are_those_of_the_target(target, tmp_path):
    shape = tiny_shape(draft_vocab_size=40)
    own = {"lm_head.weight": torch.randn(40, 64), "d2t": torch.arange(40) + 20}
    rig = BlockRig(target, tmp_path / "block", shape, layout="speculators", **own)
    rig.tensors["lm_head.weight"] = torch.zeros(101, 64).index_copy(0, 2 * torch.arange(40) + 20, own["lm_head.weight"])
    seq, sampled = rig.open(ids_of(3, 12)), rig.open(ids_of(4, 12), SamplingParams(temperature=0.9, seed=1))
    rig.send([seq, sampled])
    drafts = rig.draft([seq, sampled])
    assert_is_literal(rig, seq, drafts[0])
    assert all(token_id in range(20, 100, 2) for token_id in drafts[1].draft_ids)


def test_context_of_a_long_prompt_is_computed_chunk_by_chunk(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", num_pages=96, max_rows=48)
    seq = rig.open(ids_of(5, 200))
    for first in range(0, 199, 70):
        rig.send([seq], first, min(first + 70, 199))
        assert rig.drafter.has_work == (first + 70 <= 199)
        assert rig.drafter.step() == []
    assert_is_literal(rig, seq, rig.draft([seq])[0])


def test_states_that_are_missing_or_sent_again_leave_the_block_of_the_known_text(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block")
    missing, again = (rig.open(ids_of(seed, 30)) for seed in (8, 9))
    assert rig.draft([missing])[0].draft_ids == []
    rig.send([missing], 12)
    assert_is_literal(rig, missing, rig.draft([missing])[0], first=12)
    rig.send([again])
    rig.draft([again])
    rig.send([again], 16)
    assert_is_literal(rig, again, rig.draft([again])[0])


def test_a_text_with_a_cached_prefix_takes_over_its_context(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block")
    begin = ids_of(10, 24)
    first = rig.open([*begin, 5, 6])
    rig.send([first])
    rig.draft([first])
    rig.drafter.close(first)
    second, other = rig.open([*begin, 7, 8, 9]), rig.open([*begin[:-1], 3, 7, 8, 9])
    rig.send([second], 20)
    rig.send([other])
    for seq, drafted in zip((second, other), rig.draft([second, other]), strict=True):
        assert_is_literal(rig, seq, drafted)
    for seq in (second, other):
        rig.drafter.close(seq)
    assert rig.table.num_free == rig.table.num_pages


def test_without_pages_for_a_block_its_sequence_does_not_draft(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", num_pages=4)
    seq = rig.open(ids_of(11, 12))
    rig.send([seq])
    assert rig.draft([seq])[0].draft_ids != []
    rig.commit(seq, [1, 2, 3])
    assert rig.draft([seq])[0].draft_ids == []


def test_a_block_gives_as_many_tokens_as_requested_and_none_after_an_end_id(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block")
    seq = rig.open(ids_of(12, 12))
    rig.send([seq])
    ids = rig.draft([seq])[0].draft_ids
    assert len(ids) == 4 and rig.draft([seq], 2)[0].draft_ids == ids[:2]
    ending = rig.open(seq.ids, SamplingParams(temperature=0.0, eos_token_ids=(ids[1],)))
    rig.send([ending])
    assert rig.draft([ending])[0].draft_ids == ids[: ids.index(ids[1]) + 1]
    seq.terms = DraftTerms(8, 0.999)
    assert rig.draft([seq])[0].draft_ids == []
    seq.terms = DraftTerms(8, 0.0)
    assert rig.draft([seq])[0].draft_ids == ids


def test_the_confidence_head_of_dspark_ends_a_draft(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", tiny_shape("dspark"))
    whole = rig.open(ids_of(13, 12))
    rig.send([whole])
    ids, confidences = rig.literal(whole.ids)
    least = min(range(len(ids)), key=confidences.__getitem__)
    percent = int(100 * confidences[least]) + 1
    num_kept = next(place for place, confidence in enumerate(confidences) if 100 * confidence < percent)
    short = rig.open(whole.ids, settings={"min_confidence": str(percent)})
    rig.send([short])
    assert rig.draft([short])[0].draft_ids == ids[:num_kept]
    with pytest.raises(InvalidArgumentError, match="min_confidence"):
        rig.open(ids_of(13, 12), settings={"min_confidence": "101"})


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"logit_bias": ((7, 3.0), (9, 3.0))}, {"presence_penalty": 1.0}])
def test_under_sampling_tokens_of_a_block_are_the_targets_choice_of_the_same_scores(target, tmp_path, fields):
    rig = BlockRig(target, tmp_path / "block")
    for seed in range(5):
        params = SamplingParams(temperature=0.9, seed=seed, **fields)
        seq = rig.open(ids_of(seed, 9), params)
        rig.send([seq])
        (drafted,) = rig.draft([seq])
        reference = LiteralBlock(rig.tensors, target.parts.embed(torch.arange(101)), rig.head(), rig.shape)
        logits = target.parts.head(reference.hidden(rig.states_of(seq.ids)[:-1], seq.ids[-1])[1:])
        group = SampleGroup(params, seq.prompt_ids, seq.output_ids, drafted.draft_ids[:-1])
        assert drafted.draft_ids == choose_tokens(logits.contiguous(), [group]).token_ids


def test_for_rejection_tokens_of_a_block_come_with_their_distributions(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", tiny_shape("dflash2"))
    seq = rig.open(ids_of(30, 9), SamplingParams(temperature=0.9, seed=5), wants_probs=True)
    rig.send([seq])
    (drafted,) = rig.draft([seq])
    assert len(drafted.draft_probs) == len(drafted.draft_ids) == 4
    for token_id, sparse in zip(drafted.draft_ids, drafted.draft_probs, strict=True):
        assert token_id in sparse.token_ids and len(sparse.token_ids) == 6 and sum(sparse.probs) == pytest.approx(1.0)


def test_a_first_block_that_tokens_depend_on_is_empty_whenever_it_is_requested(target, tmp_path):
    rig = BlockRig(target, tmp_path / "block", tiny_shape())
    seq = rig.open(ids_of(35, 9), draft_affects_output=True)
    rig.send([seq])
    assert rig.draft([seq])[0].draft_ids == []
    rig.commit(seq, [5])
    assert rig.draft([seq])[0].draft_ids


def test_a_pass_that_holds_no_block_is_refused_by_name(target, tmp_path):
    with pytest.raises(FailedPreconditionError, match="--max-num-batched-tokens = 4: must be at least 5, "):
        BlockRig(target, tmp_path / "block", max_rows=4)
