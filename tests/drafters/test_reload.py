"""Weights of drafters are replaced between two steps; their sequences and open requests go on with the new ones."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from betoken.draft_worker.commands import Commit
from betoken.draft_worker.core import DraftCore
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.drafter import DraftSequence
from betoken.drafters.host.feed import CommittedRows, FeatureFeed
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import Request
from betoken.drafters.host.making import DrafterMaker, attached_layers
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.sampling import SamplingParams
from betoken.rpc.link.commands import CloseLink
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.draft_worker.harness import Bench, RecordingSink, request
from tests.drafters.dflash.tiny import save_block
from tests.drafters.dflash.tiny import tiny_shape as block_shape
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.drafters.medusa.files import RandomHeads
from tests.engine.tiny import save_tiny

PROMPT = [5, 6, 7, 8, 5, 6, 9, 4, 3]


def loaded(folder: Path):
    """A draft worker's core over the model in a folder, with two open sequences."""
    options = {"model": str(folder), "drafters": ("model", "staged", "ngram"), "num_pages": 40, "compile": "off"}
    hosted = load_drafters(DraftWorkerSettings(**options, threads=1), lambda stage, fraction: None)
    bench = Bench.__new__(Bench)
    bench.sink = RecordingSink()
    bench.core = DraftCore(hosted.drafters, hosted.page_tables, bench.sink, 8)
    for n, name in enumerate(("model", "staged")):
        bench.open(n, PROMPT, name)
    return hosted, bench


def drafts_of(bench):
    while bench.core.has_work:
        bench.core.step()
        bench.core.check_integrity()
    drafts = {answer.key[1]: answer.drafted.draft_ids for answer in bench.sink.answers}
    bench.sink.answers.clear()
    return drafts


def test_a_reloaded_model_drafts_with_its_new_weights_in_all_its_drafters(tmp_path: Path) -> None:
    save_tiny(tmp_path / "draft", "llama", seed=1)
    hosted, bench = loaded(tmp_path / "draft")
    for n in (0, 1):
        bench.core.apply(request(bench.core, n, 6, 0))
    old = drafts_of(bench)
    save_tiny(tmp_path / "draft", "llama", seed=2)
    for n in (0, 1):
        bench.core.apply(Commit((1, n), len(PROMPT), [2]))
        bench.core.apply(request(bench.core, n, 6, 0))
    again = hosted.maker.make_again(["model"])
    assert again.keys() == {"model", "staged"}
    bench.core.host.reload(again)
    _, fresh = loaded(tmp_path / "draft")
    for n in (0, 1):
        fresh.core.apply(Commit((1, n), len(PROMPT), [2]))
        fresh.core.apply(request(fresh.core, n, 6, 0))
    new = drafts_of(bench)
    assert new == drafts_of(fresh) != old and len(new[0]) == 6 and not bench.sink.failures
    bench.core.apply(CloseLink(1))
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages == 40


def save_weights(folder: Path, seed: int) -> None:
    shutil.rmtree(folder / "medusa", ignore_errors=True)
    RandomHeads(64, 101, seed=seed).save(folder / "medusa", "v1")
    shape = tiny_shape(hidden_size=64, state_layers=(0, 1, 1))
    save_layer(folder / "eagle3", tiny_layer(shape, seed=seed, spread=0.4))
    save_block(folder / "dflash", block_shape(), seed=seed)


class Attached:
    """A drafter with one sequence, attached to a target."""

    def __init__(self, name: str, settings: VerifyWorkerSettings, target):
        self.name, self.maker = name, DrafterMaker(settings, (name,), target)
        feed = FeatureFeed.of_attached(settings, target)
        self.host = DrafterHost(self.maker.make(), self, 101, 3, feed)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        self.hosted = self.host.open(DraftSequence((1, 1), params, PROMPT, [], 100), name)

    def drafted(self, answers):
        (self.answer,) = answers

    def lost(self, hosted):
        raise AssertionError("the sequence lost its drafter")

    def draft(self, features):
        rows = len(PROMPT) - 1
        self.host.observe(CommittedRows(features, {(1, 1): (0, list(range(rows)))}))
        self.host.request(self.hosted, Request(4, 4))
        self.host.step()
        return self.answer.drafted.draft_ids


@pytest.mark.parametrize("name", ["medusa", "eagle3", "dflash"])
def test_reloaded_weights_of_an_attached_drafter_draft_as_those_of_a_new_one(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "target", "llama")
    save_weights(tmp_path, seed=1)
    options = {name: str(tmp_path / name), "attached_drafters": (name,), "compile": "off"}
    settings = VerifyWorkerSettings(model=model, **options)
    layers = partial(attached_layers, settings)
    config = EngineConfig(model, dtype="float32", num_pages=64, compile="off", feature_layers=layers)
    target = load_runner(config)
    features = torch.randn(len(PROMPT) - 1, len(target.feature_layers), 64)
    attached = Attached(name, settings, target)
    old = attached.draft(features)
    save_weights(tmp_path, seed=2)
    attached.host.reload(attached.maker.make_again([name]))
    new = attached.draft(features)
    assert new == Attached(name, settings, target).draft(features) != old and len(new) > 0
    attached.host.check_integrity()
