"""A draft model on two ranks: the drafts of one process."""

import pytest

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.sampling import SamplingParams
from tests.drafters.parallel import MASK, save_pard
from tests.engine.rank_threads import shared_runner

COMMITTED = [[], [5], [9, 8, 7]]


def drafts_of(runner: ModelRunner, mask_token_id: int | None) -> list[tuple[list[int], object]]:
    """Drafts of a tree and of a chain, each after some commits."""
    found = []
    for num_branches in ("3", "1"):
        drafter = ModelDrafter(runner, 24, 8, mask_token_id=mask_token_id)
        params = SamplingParams(temperature=0.8, seed=3)
        sequence = DraftSequence((0, 0), params, list(range(1, 20)), [], 200, {"max_branches": num_branches})
        sequence.takes_trees = True
        drafter.open(sequence)
        for ids in COMMITTED:
            sequence.commit(ids)
            drafter.commit(sequence, ids)
            drafter.request(sequence, 6)
            while drafter.has_work:
                found += [(drafted.draft_ids, drafted.parents) for drafted in drafter.step()]
        drafter.close(sequence)
    return found


@pytest.mark.parametrize("mask_token_id", [None, MASK])
def test_drafts_of_a_model_on_two_ranks_are_those_of_one(mask_token_id: int | None, tmp_path) -> None:
    config = EngineConfig(save_pard(tmp_path), dtype="float32", num_pages=64, compile="off", self_check=False)
    expected = drafts_of(load_runner(config), mask_token_id)
    with shared_runner(config, 2) as shared:
        assert drafts_of(shared, mask_token_id) == expected
    assert len(expected) == 2 * len(COMMITTED) and all(ids for ids, _ in expected)
