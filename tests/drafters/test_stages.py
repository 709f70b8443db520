"""Drafters on hidden states of a target in pipeline stages: the drafts of one process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from betoken.drafters.registry import SPECS
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.runner import ModelRunner
from betoken.verify_worker.engine_config import engine_config
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.drafters.dflash.tiny import save_block
from tests.drafters.dflash.tiny import tiny_shape as block_shape
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.drafters.medusa.files import RandomHeads
from tests.drafters.mtp.tiny import save_target
from tests.drafters.rig import Rig, ids_of
from tests.engine.rank_threads import shared_runner
from tests.engine.tiny import save_tiny


def save_medusa(folder: Path) -> str:
    """Heads without output layers, which use the target's."""
    RandomHeads(64, 101).save(folder / "medusa", "v2")
    return save_tiny(folder / "target", "llama")


def save_eagle3(folder: Path) -> str:
    shape = tiny_shape(hidden_size=64, state_layers=(0, 1, 2))
    save_layer(folder / "eagle3", tiny_layer(shape, spread=0.4))
    return save_tiny(folder / "target", "llama")


def save_dflash(folder: Path) -> str:
    save_block(folder / "dflash", block_shape())
    return save_tiny(folder / "target", "qwen3")


def save_mtp(folder: Path) -> str:
    return str(save_target(folder / "target", "qwen3_5"))


SAVED: dict[str, Callable[[Path], str]] = {
    "medusa": save_medusa,
    "eagle3": save_eagle3,
    "dflash": save_dflash,
    "mtp": save_mtp,
}


def drafts_of(runner: ModelRunner, name: str, settings: VerifyWorkerSettings) -> list[Any]:
    """Drafts of two sequences, each made while a forward of a third one is under way."""
    drafter = SPECS[name].make(SimpleNamespace(settings=settings, target=runner))  # type: ignore[arg-type]
    rig, found = Rig(runner, drafter, None), []
    seqs = [rig.open(ids_of(seed, length), takes_trees=True) for seed, length in ((1, 9), (2, 40))]
    rig.send(seqs)
    pages, _ = runner.page_table.allocate(range(8))
    for number in range(3):
        begun = runner.begin([Segment(pages, number, [number + 1], 1)])
        found += [(draft.draft_ids, draft.parents) for draft in rig.draft(seqs, 4)]
        found.append(runner.finish(begun).logits.tolist())
        for seq in seqs:
            rig.commit(seq, [7, 8 + number])
    return found


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in SAVED), ("eagle3", 4), ("medusa", 4)])
def test_drafts_on_hidden_states_of_two_stages_are_those_of_one(name: str, size: int, tmp_path: Path) -> None:
    weights = {} if name == "mtp" else {name: str(tmp_path / name)}
    options = {"attached_drafters": (name,), "dtype": "float32", "compile": "off", "num_pages": 64, "threads": 1}
    settings = VerifyWorkerSettings(model=SAVED[name](tmp_path), **options, **weights)
    config = engine_config(settings)
    expected = drafts_of(load_runner(config), name, settings)
    with shared_runner(config, size, 2) as shared:
        assert drafts_of(shared, name, settings) == expected
    assert len(expected) == 9 and all(ids for ids, _ in expected[:2])
