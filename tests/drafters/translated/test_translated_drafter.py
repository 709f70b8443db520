"""Translated drafts equal the paper's definition after any commit: whole forwards of the unchanged draft model."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.draft_worker.commands import Commit, Open
from betoken.draft_worker.core import DraftCore
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.translated.sample import SAMPLE
from betoken.drafters.translated.translation import NONE
from betoken.engine.sampling import SamplingParams
from betoken.kernels import noise
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import RecordingSink, request
from tests.drafters.translated.pairs import save_translated_pair

PARAMS = {
    1: SamplingParams(temperature=0.0, ignore_eos=True),
    2: SamplingParams(temperature=0.8, seed=3, ignore_eos=True),
}
NUM_PAGES = 60


class TranslatedBench:
    """A core with the translated drafters of one draft model, and the model itself."""

    def __init__(self, folder, kind, **options):
        save_translated_pair(folder, kind)
        named = {"model": str(folder / "draft"), "target_tokenizer": str(folder / "target"), "dtype": "float32"}
        fixed = {"drafters": ("model", "staged"), "num_pages": NUM_PAGES, "compile": "off", "threads": 1}
        self.hosted = load_drafters(DraftWorkerSettings(**fixed | named | options), lambda stage, fraction: None)
        self.made = self.hosted.maker.translation
        self.sink = RecordingSink()
        self.core = DraftCore(self.hosted.drafters, self.hosted.page_tables, self.sink, 8)
        self.reference = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).eval()

    def open(self, n, ids, drafter="model", params=None, **fields):
        self.core.apply(Open((1, n), params or PARAMS[n], tuple(ids), (), 900, drafter, **fields))

    def draft(self, *numbers, num_tokens=4, **fields):
        self.sink.answers.clear()
        for n in numbers:
            self.core.apply(request(self.core, n, num_tokens, 0, **fields))
        while self.core.has_work:
            self.core.step()
            self.core.check_integrity()
        assert not self.sink.failures
        return {answer.key[1]: answer.drafted for answer in self.sink.answers}

    def own_ids(self, n, drafter="model"):
        """The committed text as the draft model has it."""
        sequence = self.core._sequences.get((1, n)).sequence
        return [self.made.draft_id(each) for each in self.hosted.drafters[drafter]._open[sequence].ids]

    @torch.no_grad()
    def logits(self, own_ids):
        return self.reference(input_ids=torch.tensor([own_ids]), use_cache=False).logits[0, -1].float()

    def common_rows(self, logits):
        """The definition of TLI: the row over the target's ids, without tokens that one vocabulary lacks."""
        row = torch.full((self.made.target.size,), -torch.inf)
        for draft_id, target_id in enumerate(self.made.target_ids):
            if target_id != NONE:
                row[target_id] = logits[draft_id]
        return row

    def draft_by_token(self, own_ids, length, params, num_tokens):
        """TLI with the target's noise: argmax of logits + T * noise(seed, position, target id)."""
        ids = []
        for place in range(num_tokens):
            row = self.common_rows(self.logits([*own_ids, *[self.made.draft_ids[each] for each in ids]]))
            ids.append(
                int((row + params.temperature * noise.gumbel([params.seed], [length + place], len(row))[0]).argmax())
            )
        return ids


@pytest.mark.parametrize("drafter", ["model", "staged"])
def test_drafts_of_common_tokens_equal_the_papers_definition(tmp_path, drafter):
    rng = random.Random(drafter)
    bench = TranslatedBench(tmp_path, "tokens")
    target = bench.made.target
    texts = {n: target.encode(SAMPLE.encode())[n * 30 : n * 60] for n in PARAMS}
    for n, ids in texts.items():
        bench.open(n, ids, drafter)
        assert bench.own_ids(n, drafter) == bench.made.draft.encode(target.decode(ids)), "tokenized from text"
    for _ in range(5):
        drafts = bench.draft(*texts)
        for n, ids in texts.items():
            expected = bench.draft_by_token(bench.own_ids(n, drafter), len(ids), PARAMS[n], 4)
            assert drafts[n].draft_ids == expected
            emitted = [*expected[: rng.randrange(5)], rng.randrange(target.size)]
            bench.core.apply(Commit((1, n), len(ids), emitted))
            ids += emitted
    bench.core.apply(CloseLink(1))
    assert bench.sink.load.num_free_pages == NUM_PAGES


def test_the_distribution_of_common_tokens_is_renormalised(tmp_path):
    bench = TranslatedBench(tmp_path, "tokens")
    ids = bench.made.target.encode(b"def fibonacci(n):\n    ")
    bench.open(2, ids, params=SamplingParams(temperature=0.8, seed=3, top_k=5, ignore_eos=True), wants_probs=True)
    drafted = bench.draft(2, num_tokens=2)[2]
    own_ids = bench.own_ids(2)
    for draft_id, sparse in zip(drafted.draft_ids, drafted.draft_probs, strict=True):
        top = torch.topk(bench.common_rows(bench.logits(own_ids)), 5)
        expected = dict(zip(top.indices.tolist(), torch.softmax(top.values / 0.8, 0).tolist(), strict=True))
        assert dict(zip(sparse.token_ids, sparse.probs, strict=True)) == pytest.approx(expected, rel=1e-3)
        assert draft_id in expected
        own_ids.append(bench.made.draft_ids[draft_id])


def test_drafts_of_text_equal_the_targets_encoding_of_free_drafts(tmp_path):
    """String-level exact match: a greedy draft in the model's own tokens, decoded, and encoded again."""
    bench = TranslatedBench(tmp_path, "text")
    made, ids = bench.made, bench.made.target.encode(SAMPLE.encode())[40:80]
    bench.open(1, ids)
    num_rewritten = 0
    for piece in [b"\n    ret", b"urn self", b".win", b"dow", b"", b" == Non", b"e"]:
        own_ids = bench.own_ids(1)
        free = list(own_ids)
        for _ in range(4):
            free.append(int(bench.logits(free).argmax()))
        text = made.draft.decode(free[len(own_ids) :])
        drafted = bench.draft(1)[1].draft_ids
        assert len(drafted) <= 4 and text.startswith(made.target.decode(drafted)) and drafted
        emitted = made.target.encode(piece) or [*drafted[:2], 199]
        bench.core.apply(Commit((1, 1), len(ids), emitted))
        ids += emitted
        num_rewritten += bench.own_ids(1)[: len(own_ids)] != own_ids
        assert made.draft.decode(bench.own_ids(1)) == made.target.decode(ids)
    assert num_rewritten, "no commit changed ids that the draft model had"
    bench.core.apply(CloseLink(1))
    assert bench.sink.load.num_free_pages == NUM_PAGES


def test_drafts_that_another_drafters_step_finishes_are_whole(tmp_path):
    """`staged` steps the same model, and ends drafts of `model` with its own."""
    bench = TranslatedBench(tmp_path, "text", drafters=("staged", "model"))
    ids = bench.made.target.encode(b"def fibonacci(n):\n    ")
    bench.open(1, ids)
    bench.open(2, ids, "staged", PARAMS[1])
    drafts = bench.draft(1, 2)
    assert drafts[1].draft_ids == drafts[2].draft_ids != []


def test_trees_are_grown_of_common_tokens_only(tmp_path):
    bench = TranslatedBench(tmp_path, "tokens", model_branches=3)
    bench.open(1, bench.made.target.encode(b"class Stack:\n"))
    drafted = bench.draft(1, num_tokens=8, takes_trees=True)[1]
    assert drafted.parents is not None and len(drafted.draft_ids) == 8
    assert all(bench.made.draft_ids[each] != NONE for each in drafted.draft_ids)


def test_text_is_drafted_in_chains(tmp_path):
    bench = TranslatedBench(tmp_path, "text", model_branches=3)
    bench.open(1, bench.made.target.encode(b"class Stack:\n"))
    assert bench.draft(1, num_tokens=8, takes_trees=True)[1].parents is None


def test_a_draft_that_cannot_be_translated_costs_one_sequence_its_draft(tmp_path, monkeypatch, caplog):
    bench = TranslatedBench(tmp_path, "text")
    translate = type(bench.made).to_target

    def broken(made, committed_ids, mixed_ids):
        if committed_ids[0] == 7:
            raise ValueError("a fault")
        return translate(made, committed_ids, mixed_ids)

    monkeypatch.setattr(type(bench.made), "to_target", broken)
    bench.open(1, [7, 8, 9])
    bench.open(2, [8, 8, 9], params=PARAMS[1])
    drafts = bench.draft(1, 2)
    assert drafts[1].draft_ids == [] != drafts[2].draft_ids and "a draft cannot be translated" in caplog.text


def test_a_pard_model_drafts_translated_tokens_in_one_forward(tmp_path):
    """The mask token is the draft model's own id in the handshake."""
    save = tmp_path / "draft" / "config.json"
    bench = TranslatedBench(tmp_path, "tokens")
    save.write_text(json.dumps(json.loads(save.read_text()) | {"pard_token": 17}))
    options = {"model": str(tmp_path / "draft"), "target_tokenizer": str(tmp_path / "target"), "dtype": "float32"}
    fixed = {"drafters": ("model",), "num_pages": NUM_PAGES, "compile": "off", "threads": 1}
    bench.hosted = load_drafters(DraftWorkerSettings(**fixed | options), lambda stage, fraction: None)
    bench.core = DraftCore(bench.hosted.drafters, bench.hosted.page_tables, bench.sink, 8)
    bench.open(1, bench.made.target.encode(b"def fibonacci(n):\n"))
    drafted = bench.draft(1)[1]
    own_ids, expected = bench.own_ids(1), []
    for place in range(4):
        row = bench.common_rows(bench.logits([*own_ids, *[17] * place]))
        expected.append(int(row.argmax()))
    assert drafted.draft_ids == expected and drafted.num_forwards == 1 and bench.hosted.mask_token_id == 17
