"""The Medusa drafter against the definition, written out for one sequence: heads, noise, tree, calibration, price."""

import math
from pathlib import Path

import pytest
import torch

from betoken.common.economy.terms import DraftTerms
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.drafters.medusa.adapters import Adapter, AdapterStore, describe
from betoken.drafters.medusa.drafter import ERROR_SCALE, MedusaDrafter
from betoken.drafters.medusa.module import MedusaHeads
from betoken.engine.runner import ModelRunner
from betoken.kernels import noise
from tests.drafters.medusa.bench import HIDDEN, VOCAB, Bench
from tests.drafters.medusa.files import RandomHeads

NUM_HEADS = 3


@pytest.fixture
def heads() -> RandomHeads:
    return RandomHeads(HIDDEN, VOCAB, NUM_HEADS)


@pytest.fixture
def drafter(heads: RandomHeads, target: ModelRunner, tmp_path: Path) -> MedusaDrafter:
    layout = describe(heads.save(tmp_path / "own", "v1"), target)
    own = Adapter("", layout, MedusaHeads(layout, target.parts))
    return MedusaDrafter(own, AdapterStore(None, target, 1), VOCAB)


def literal_guesses(heads: RandomHeads, sequence: DraftSequence, state: torch.Tensor) -> list[list[tuple[int, float]]]:
    """Every head's ids, the best first, each with the logarithm of its share: head i guesses the token at position
    t + 2 + i from the state at t, ranked by the target's rule, logits + T * noise(seed, position, id)."""
    found = []
    t = len(sequence.ids) - 2
    params = sequence.params
    for i in range(NUM_HEADS):
        logits = heads.logits(i, state, torch.empty(0), "v1")
        scores = logits + params.temperature * noise.gumbel([params.seed], [t + 2 + i], VOCAB)[0]
        log_shares = (scores / ERROR_SCALE).log_softmax(0)
        found.append([(int(v), float(log_shares[v])) for v in scores.argsort(descending=True)])
    return found


def literal_tree(guesses: list[list[tuple[int, float]]], num_nodes: int, num_branches: int) -> list[tuple[int, ...]]:
    """The paths of ids with the largest products of shares."""
    scored: dict[tuple[int, ...], float] = {(): 0.0}
    level = [()]
    for head in guesses:
        level_next = []
        for path in level:
            for token_id, log_share in head[:num_branches]:
                scored[(*path, token_id)] = scored[path] + log_share
                level_next.append((*path, token_id))
        level = level_next
    del scored[()]
    return sorted(scored, key=lambda path: -scored[path])[:num_nodes]


def paths_of(drafted: Drafted) -> list[tuple[int, ...]]:
    parents = drafted.parents or list(range(-1, len(drafted.draft_ids) - 1))
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(drafted.draft_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_nodes", [1, 5, 16, 60])
def test_medusa_trees_and_chains_of_a_batch_equal_the_definition(
    temperature: float, num_nodes: int, heads: RandomHeads, drafter: MedusaDrafter
) -> None:
    bench = Bench(drafter)
    trees = [bench.open(n, length=9 + n, temperature=temperature) for n in range(1, 4)]
    chain = bench.open(9, temperature=temperature, takes_trees=False)
    narrow = bench.open(10, temperature=temperature, settings={"max_branches": "2", "max_depth": "2"})
    bench.send([*trees, chain, narrow])
    drafted = bench.draft(*((sequence, num_nodes) for sequence in (*trees, chain, narrow)))
    for sequence, one in zip(trees, drafted, strict=False):
        guesses = literal_guesses(heads, sequence, bench.states[sequence])
        assert paths_of(one) == literal_tree(guesses, num_nodes, 10)
        assert one.sources == ["medusa"]
    guesses = literal_guesses(heads, chain, bench.states[chain])
    assert drafted[3].parents is None
    assert drafted[3].draft_ids == [head[0][0] for head in guesses][:num_nodes]
    guesses = literal_guesses(heads, narrow, bench.states[narrow])
    assert paths_of(drafted[4]) == literal_tree(guesses[:2], num_nodes, 2)


def test_a_medusa_draft_does_not_depend_on_the_batch(drafter: MedusaDrafter) -> None:
    bench = Bench(drafter)
    sequences = [bench.open(n, temperature=0.8) for n in range(7)]
    bench.send(sequences)
    together = bench.draft(*((sequence, 12) for sequence in sequences))
    for sequence, one in zip(sequences, together, strict=True):
        (alone,) = bench.draft((sequence, 12))
        assert (alone.draft_ids, alone.parents) == (one.draft_ids, one.parents)


def test_paths_of_ranks_are_of_the_perturbed_order(heads: RandomHeads, drafter: MedusaDrafter) -> None:
    bench = Bench(drafter)
    sequence = bench.open(1, temperature=0.9, settings={"tree": "[[0], [3], [3, 1], [3, 1, 2], [0, 0]]"})
    bench.send([sequence])
    (drafted,) = bench.draft((sequence, 99))
    first, second, third = literal_guesses(heads, sequence, bench.states[sequence])
    expected = [(0,), (3,), (3, 1), (3, 1, 2), (0, 0)]
    ids = [tuple(head[rank][0] for head, rank in zip((first, second, third), path, strict=False)) for path in expected]
    assert sorted(paths_of(drafted)) == sorted(ids)


@pytest.mark.parametrize("mode", ["rejection", "typical"])
def test_if_drafts_affect_the_output_they_are_the_likeliest_and_wait_for_the_first_verification(
    mode: str, heads: RandomHeads, drafter: MedusaDrafter
) -> None:
    bench = Bench(drafter)
    is_typical = mode == "typical"
    sequence = bench.open(
        1, temperature=0.8, draft_affects_output=True, wants_probs=not is_typical, takes_trees=is_typical
    )
    greedy = bench.open(1, temperature=0.0)
    bench.send([sequence, greedy])
    drafter.observe([FeatureSpan(sequence, len(sequence.ids) - 2, 0, 1)], bench.states[greedy][None, None])
    first, second = bench.draft((sequence, 6), (greedy, 6))
    if is_typical:
        assert (first.draft_ids, first.parents) == (second.draft_ids, second.parents)
    else:
        assert first.parents is None and first.draft_ids[0] == second.draft_ids[0]
    fresh = bench.open(2, draft_affects_output=True)
    fresh.ids.pop()
    fresh.output_ids.clear()
    bench.send([fresh])
    assert bench.draft((fresh, 6))[0].draft_ids == []


def test_without_the_row_of_the_last_decided_token_there_is_no_draft(drafter: MedusaDrafter) -> None:
    bench = Bench(drafter)
    sequence = bench.open(1)
    assert bench.draft((sequence, 6))[0].draft_ids == []
    bench.send([sequence])
    assert bench.draft((sequence, 6))[0].draft_ids
    bench.commit(sequence, [7, 8])
    assert bench.draft((sequence, 6))[0].draft_ids == [], "the state is of the token before"
    bench.send([sequence])
    assert bench.draft((sequence, 6))[0].draft_ids


def test_a_draft_ends_with_the_answer_and_with_the_longest_sequence(drafter: MedusaDrafter) -> None:
    bench = Bench(drafter)
    short = bench.open(1, max_length=12)
    ending = bench.open(2, ignore_eos=False, logit_bias=((0, 100.0),))
    bench.send([short, ending])
    for one, num_tokens in zip(bench.draft((short, 50), (ending, 50)), (2, 1), strict=True):
        assert max(map(len, paths_of(one))) == num_tokens or one.sequence is ending
    (drafted,) = bench.draft((ending, 1))
    assert drafted.draft_ids == [0]
    (drafted,) = bench.draft((ending, 8))
    parents = drafted.parents or list(range(-1, len(drafted.draft_ids) - 1))
    assert all(drafted.draft_ids[parent] != 0 for parent in parents if parent >= 0)


def test_accepted_tokens_calibrate_each_head_and_the_price_cuts_the_tree(
    heads: RandomHeads, drafter: MedusaDrafter
) -> None:
    bench = Bench(drafter)
    sequence = bench.open(1)
    own = drafter._own
    assert own is not None
    for _ in range(200):
        bench.send([sequence])
        (drafted,) = bench.draft((sequence, 8))
        best = next(path for path in paths_of(drafted) if len(path) == 1)
        wrong = next(
            token_id
            for token_id in range(VOCAB)
            if all(path[:1] != best or path[1:2] != (token_id,) for path in paths_of(drafted))
        )
        bench.commit(sequence, [best[0], wrong])
        if len(sequence.ids) > 190:
            break
    assert own.calibrations[0].exponent < 1.0 < own.calibrations[1].exponent
    assert own.calibrations[2].exponent == 1.0, "never reached"
    fresh = bench.open(2)
    bench.send([fresh])
    guesses = literal_guesses(heads, fresh, bench.states[fresh])
    exponents = [one.exponent for one in own.calibrations]
    scored = [[(v, e * share) for v, share in head] for head, e in zip(guesses, exponents, strict=True)]
    for price in (0.0, 0.02, 0.2, 0.9):
        fresh.terms = DraftTerms(12, price)
        (drafted,) = bench.draft((fresh, 3))
        expected = literal_tree(scored, 12, 10)
        scores = [sum(dict(scored[d])[v] for d, v in enumerate(path)) for path in expected]
        num_kept = max(1, sum(score >= math.log(price) for score in scores)) if price else 12
        assert paths_of(drafted) == (expected[:num_kept] if math.exp(scores[0]) >= price else [])
    fresh.terms = DraftTerms(12, 0.01, min_gain=100.0)
    assert bench.draft((fresh, 3))[0].draft_ids == []
