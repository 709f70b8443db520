"""An attached PARD-2 model drafts as its paper defines it: each embedding contains the target's states of the position
before, whatever the batch, the draft model's cache and the order in which states arrive."""

import math
import random

import pytest

from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.sampler import SampleGroup, perturbed_top
from tests.drafters.parallel import SAMPLINGS, Reference
from tests.drafters.pard2 import Pard2Rig, Reference2, save_both
from tests.drafters.rig import GREEDY, ids_of

PROMPT = ids_of(5, 40)


@pytest.mark.parametrize(("family", "has_bias"), [("llama", True), ("gemma2", False)])
def test_drafts_equal_the_definition_step_by_step(tmp_path, family, has_bias):
    rng = random.Random(family)
    target, directory = save_both(tmp_path, family=family, has_bias=has_bias)
    reference, rig = Reference2(directory, target), Pard2Rig(directory, target)
    seqs = {n: rig.open(ids_of(n, rng.randrange(1, 40)), params) for n, params in SAMPLINGS.items()}
    rig.send([seq for seq in seqs.values() if len(seq.ids) > 1])
    for seq in seqs.values():
        rig.commit(seq, [rng.randrange(101)])
    for _ in range(8):
        drafting = [n for n in seqs if rng.random() < 0.8] or [1]
        num_tokens = rng.choice([1, 4, 8])
        drafts = dict(zip(drafting, rig.draft([seqs[n] for n in drafting], num_tokens), strict=True))
        for n, drafted in drafts.items():
            seq = seqs[n]
            expected = reference.draft(list(seq.ids), num_tokens, SAMPLINGS[n], len(seq.prompt_ids))
            assert drafted.draft_ids == expected and drafted.num_forwards == 1
        for n, seq in seqs.items():
            kept = drafts[n].draft_ids[: rng.randrange(9)] if n in drafts else []
            rig.commit(seq, [*kept, rng.randrange(101)])


def test_states_change_what_is_drafted(tmp_path):
    target, directory = save_both(tmp_path)
    reference = Reference2(directory, target)
    known = reference.draft(PROMPT, 8, GREEDY, len(PROMPT))
    reference.num_unknown = len(PROMPT)
    assert reference.draft(PROMPT, 8, GREEDY, len(PROMPT)) != known


@pytest.mark.parametrize("n", SAMPLINGS)
def test_children_of_a_tree_node_are_the_likeliest_tokens_of_its_position(tmp_path, n):
    (target, directory), params = save_both(tmp_path), SAMPLINGS[n]
    reference, rig = Reference2(directory, target), Pard2Rig(directory, target)
    seq = rig.open(PROMPT, params, settings={"max_branches": "3", "max_depth": "4"}, takes_trees=True)
    rig.send([seq])
    (drafted,) = rig.draft([seq], 10)
    assert len(drafted.draft_ids) == 10 and drafted.parents is not None and drafted.num_forwards == 1
    rows, paths, children = reference.rows(PROMPT, 4), {-1: []}, {}
    for node, (token_id, parent) in enumerate(zip(drafted.draft_ids, drafted.parents, strict=True)):
        paths[node] = [*paths[parent], token_id]
        children.setdefault(parent, []).append(token_id)
    for parent, found in children.items():
        path = paths[parent]
        best, shares = perturbed_top(rows[[len(path)]], [SampleGroup(params, PROMPT, path, ())], 3, 1.0)
        likely = [i for i, share in zip(best[0].tolist(), shares[0].tolist(), strict=True) if share > -math.inf]
        assert found == likely[: len(found)]


def test_nothing_is_drafted_before_the_last_states_are_known(tmp_path):
    target, directory = save_both(tmp_path)
    rig = Pard2Rig(directory, target)
    seq, steering = rig.open(PROMPT), rig.open(PROMPT, draft_affects_output=True)
    for end in (None, 10, 25):
        if end is not None:
            rig.send([seq], end=end)
        assert [drafted.draft_ids for drafted in rig.draft([seq, steering])] == [[], []]
    rig.send([seq, steering])
    (drafted, none) = rig.draft([seq, steering])
    assert drafted.draft_ids == Reference2(directory, target).draft(PROMPT, 8, GREEDY, len(PROMPT))
    assert none.draft_ids == [], "whether the prompt is computed at the first request is chance"


def test_positions_without_states_have_none_unless_the_draft_models_cache_holds_them(tmp_path):
    target, directory = save_both(tmp_path)
    reference, rig = Reference2(directory, target), Pard2Rig(directory, target)
    whole = reference.draft(PROMPT, 8, GREEDY, len(PROMPT))
    partly = Reference2(directory, target)
    partly.num_unknown = 32
    expected = partly.draft(PROMPT, 8, GREEDY, len(PROMPT))
    assert expected != whole
    for first, wanted in ((32, expected), (0, whole), (32, whole)):
        seq = rig.open(PROMPT)
        rig.send([seq], first)  # the target found the pages of earlier positions in its cache
        assert [drafted.draft_ids for drafted in rig.draft([seq])] == [wanted], first
        rig.drafter.close(seq)
    longer = [*PROMPT, *ids_of(6, 40)]
    for first in (32, 64):  # the last sequence left no hole, and shares what it computed
        seq = rig.open(longer)
        rig.send([seq], first)
        assert rig.draft([seq])[0].draft_ids == reference.draft(longer, 8, GREEDY, len(longer)), first
        rig.drafter.close(seq)


def test_states_outlive_the_draft_models_pages_and_are_sent_twice_after_a_preemption(tmp_path):
    target, directory = save_both(tmp_path)
    reference, rig = Reference2(directory, target), Pard2Rig(directory, target, num_pages=5)
    seqs = [rig.open(ids_of(n, 40)) for n in range(2)]
    for seq in seqs:
        rig.send([seq])
    for _ in range(3):
        for seq in seqs:  # there are pages for one of them
            (drafted,) = rig.draft([seq])
            rig.drafter._caches[seq].idle_since_ns = 0
            if drafted.draft_ids:
                assert drafted.draft_ids == reference.draft(list(seq.ids), 8, GREEDY, 40)
            rig.send([seq], end=20)
            rig.commit(seq, [7])
    assert all(rig.drafter._vectors[seq].length == len(seq.ids) for seq in seqs)


@pytest.mark.parametrize("fields", [{"pard2_target_dim": 4 * 32}, {"pard2_target_layers": [-1, 1, 0, 5]}])
def test_a_checkpoint_for_another_target_drafts_without_states(tmp_path, caplog, fields):
    target, directory = save_both(tmp_path, **fields)
    caplog.set_level("WARNING")
    rig = Pard2Rig(directory, target)
    assert type(rig.drafter) is ModelDrafter and rig.target.feature_layers == ()
    assert "drafts as PARD without hidden states" in caplog.text
    (drafted,) = rig.draft([rig.open(PROMPT)])
    assert drafted.draft_ids == Reference(directory).draft(PROMPT, 8, GREEDY, len(PROMPT))


def test_drafts_of_a_half_type_do_not_depend_on_the_batch(tmp_path):
    target, directory = save_both(tmp_path)
    rigs = [Pard2Rig(directory, target, dtype="bfloat16", max_rows=max_rows) for max_rows in (11, 60)]
    texts = [ids_of(n, 30 + n) for n in range(3)]
    drafts = []
    for rig in rigs:
        seqs = [rig.open(ids) for ids in texts]
        for seq in seqs:
            rig.send([seq])
        if rig is rigs[0]:
            drafts.append([drafted.draft_ids for drafted in rig.draft(seqs, 6)])
        else:
            drafts.append([rig.draft([seq], 6)[0].draft_ids for seq in seqs])
    assert drafts[0] == drafts[1]
