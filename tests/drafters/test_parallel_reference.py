"""Drafts of PARD checkpoints equal the paper's definition, round by round, on tiny random models."""

import math
import random
from collections import Counter

import pytest
import torch
from scipy import stats

from betoken.draft_worker.commands import Commit
from betoken.engine.sampler import SampleGroup, perturbed_top
from betoken.engine.sampler.verification import BlockGroup, VerificationMode, verify_blocks
from betoken.engine.sampling import SamplingParams
from tests.drafters.parallel import SAMPLINGS, RealBench, Reference, save_pard


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2", "qwen3_5"])
def test_parallel_drafts_equal_the_papers_definition_round_by_round(tmp_path, family):
    rng = random.Random(family)
    directory = save_pard(tmp_path, family)
    reference, bench = Reference(directory), RealBench(directory)
    texts = {n: [rng.randrange(101) for _ in range(rng.randrange(2, 40))] for n in SAMPLINGS}
    num_prompt = {n: len(ids) for n, ids in texts.items()}
    for n, ids in texts.items():
        bench.open(n, ids, len(ids), SAMPLINGS[n])
    for _ in range(8):
        sizes = {n: rng.choice([1, 4, 8]) for n in texts if rng.random() < 0.8} or {1: 4}
        drafts = bench.draft(sizes)
        for n, drafted in drafts.items():
            expected = reference.draft(texts[n], sizes[n], SAMPLINGS[n], num_prompt[n])
            assert drafted.draft_ids == expected and drafted.num_forwards == 1
        for n, ids in texts.items():
            kept = drafts[n].draft_ids[: rng.randrange(9)] if n in drafts else []
            emitted = [*kept, rng.randrange(101)]
            bench.core.apply(Commit((1, n), len(ids), emitted))
            ids += emitted
    bench.free_everything()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int4", "activations": "int8"}])
def test_parallel_drafts_do_not_depend_on_the_batch_or_on_the_rounds_before(tmp_path, options):
    rng = random.Random(1)
    directory = save_pard(tmp_path)
    bench, alone = (RealBench(directory, max_rows=max_rows, **options) for max_rows in (11, 60))
    texts = {n: [rng.randrange(101) for _ in range(rng.randrange(2, 40))] for n in (1, 3)}
    for n, ids in texts.items():
        bench.open(n, ids, len(ids), SAMPLINGS[n])
    for _ in range(4):
        drafts = bench.draft(dict.fromkeys(texts, 6))
        for n, ids in texts.items():
            alone.open(n, ids, len(ids), SAMPLINGS[n])
            expected = alone.draft({n: 6})[n].draft_ids
            alone.free_everything()
            assert drafts[n].draft_ids == expected
            emitted = [*drafts[n].draft_ids[:2], rng.randrange(101)]
            bench.core.apply(Commit((1, n), len(ids), emitted))
            ids += emitted
    bench.free_everything()


@pytest.mark.parametrize("n", SAMPLINGS)
def test_children_of_a_parallel_tree_node_are_the_likeliest_tokens_of_its_position(tmp_path, n):
    directory, params = save_pard(tmp_path), SAMPLINGS[n]
    reference, bench, ids = Reference(directory), RealBench(directory), list(range(3, 20))
    bench.open(n, ids, len(ids), params, max_branches="3", max_depth="4")
    drafted = bench.draft({n: 10}, takes_trees=True)[n]
    assert len(drafted.draft_ids) == 10 and drafted.parents is not None
    assert bench.num_forwards == 1
    rows = reference.rows(ids, 4)
    paths, children = {-1: []}, {}
    for node, (token_id, parent) in enumerate(zip(drafted.draft_ids, drafted.parents, strict=True)):
        paths[node] = [*paths[parent], token_id]
        children.setdefault(parent, []).append(token_id)
    for parent, found in children.items():
        path = paths[parent]
        best, shares = perturbed_top(rows[[len(path)]], [SampleGroup(params, ids, path, ())], 3, 1.0)
        likely = [i for i, share in zip(best[0].tolist(), shares[0].tolist(), strict=True) if share > -math.inf]
        assert found == likely[: len(found)]
    bench.free_everything()


def test_rejection_of_parallel_drafts_keeps_the_targets_distribution(tmp_path):
    """Draft tokens of all rows follow the reported distributions, and emitted tokens follow the target's."""
    directory, ids, num_seeds = save_pard(tmp_path), list(range(9)), 1200
    reference, bench = Reference(directory), RealBench(directory, max_rows=64)
    rows = reference.rows(ids, 4)
    target = rows + 0.5 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
    drafted_at, emitted_at = [Counter() for _ in range(3)], [Counter() for _ in range(3)]
    for seed in range(num_seeds):
        params = SamplingParams(temperature=1.0, top_k=6, seed=seed, ignore_eos=True)
        bench.open(1, ids, len(ids), params, wants_probs=True)
        drafted = bench.draft({1: 3})[1]
        bench.free_everything()
        group = SampleGroup(params, ids, [], drafted.draft_ids)
        block = BlockGroup(group, VerificationMode.REJECTION, drafted.draft_probs)
        (verified,) = verify_blocks(target, [block])
        for counts, tokens in ((drafted_at, drafted.draft_ids), (emitted_at, verified.emitted_ids[:3])):
            for place, token_id in enumerate(tokens):
                counts[place][token_id] += 1
    for place in range(3):
        assert_distributed(drafted_at[place], rows[place])
        assert_distributed(emitted_at[place], target[place])


def assert_distributed(counts, logits):
    """Chi-square against the softmax of the six most likely ids."""
    best, likely = logits.topk(6)
    expected = (best.double().softmax(0) * counts.total()).numpy()
    observed = [counts[token_id] for token_id in likely.tolist()]
    assert sum(observed) == counts.total() > 100
    is_common = expected >= 5
    assert is_common.sum() > 1
    pairs = [[*x[is_common], x[~is_common].sum() + 1e-9] for x in (torch.tensor(observed).numpy(), expected)]
    assert stats.chisquare(*pairs).pvalue > 1e-4
