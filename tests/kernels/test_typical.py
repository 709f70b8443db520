"""typical: hand cases, the paper's rule written out in float64; longest_path: the paper's candidates written out."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from betoken.kernels.accept import accept_block, longest_path
from betoken.kernels.sample import sample
from betoken.kernels.typical import typical
from tests.kernels.verification_cases import columns, make_blocks, target_distribution


def by_hand(rows: list[list[float]], draft_ids: list[int], epsilon: float = 0.09, delta: float = 0.3) -> list[bool]:
    """Whether each draft id is accepted after the row of its place."""
    num_rows = len(rows)
    is_accepted, shares = typical(
        torch.tensor(rows, dtype=torch.float32).log(),
        torch.arange(len(draft_ids)),
        torch.tensor(draft_ids, dtype=torch.int64),
        torch.full((num_rows,), epsilon),
        torch.full((num_rows,), delta),
        *columns(num_rows, 1.0, 0, 1.0, 0.0),
    )
    assert shares.tolist() == pytest.approx([rows[i][draft_id] for i, draft_id in enumerate(draft_ids)], rel=1e-5)
    return is_accepted.tolist()


def test_typical_acceptance_by_hand() -> None:
    peaked, flat = [0.90, 0.0895, 0.0105], [1 / 40] * 40
    assert by_hand([peaked], []) == []
    assert by_hand([peaked, peaked], [0]) == [True]
    assert by_hand([peaked], [1]) == [False], "0.0895 is not above epsilon"
    assert by_hand([[0.90, 0.0905, 0.0095]], [1]) == [True], "0.0905 is"
    assert by_hand([flat, flat], [17, 3]) == [True, True], "a flat target takes what is above 0.3 / 40"
    assert by_hand([peaked, peaked], [0, 2]) == [True, False]
    assert by_hand([peaked], [1], epsilon=0.08) == [True]
    assert by_hand([flat], [17], delta=1.1) == [False], "nor above 1.1 / 40"
    assert by_hand([[0.9, 0.1, 0.0]], [2], epsilon=0.0) == [False], "what cannot be is never taken"


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000])
def test_typical_acceptance_equals_the_rule_written_out(vocab_size: int) -> None:
    blocks = make_blocks(np.random.default_rng(vocab_size), vocab_size, [0, 1, 5, 0, 3, 2, 4] * 6)
    is_accepted, shares = typical(*blocks.for_typical)
    for node, row in enumerate(blocks.rows_before.tolist()):
        temperature, top_k, top_p, min_p = (float(column[row]) for column in blocks.sampling_columns)
        target = target_distribution(blocks.logits[row].float().numpy(), temperature, int(top_k), top_p, min_p)
        kept = target[target > 0]
        epsilon, delta = (float(bound[row]) for bound in blocks.bounds)
        threshold = min(epsilon, delta * np.exp((kept * np.log(kept)).sum()))
        share = target[blocks.draft_ids[node]]
        assert is_accepted[node] == (share > threshold)
        assert float(shares[node]) == pytest.approx(share, rel=1e-4, abs=1e-9)
    assert set(is_accepted.tolist()) == ({True} if vocab_size == 1 else {False, True})


def test_greedy_typical_acceptance_is_the_equality_test() -> None:
    blocks = make_blocks(np.random.default_rng(5), 40, [0, 1, 5, 3, 2, 8] * 8)
    greedy = columns(blocks.logits.shape[0], 0.0, 3, 0.5, 0.5)
    target_ids = sample(blocks.logits, *blocks.noise_columns, *greedy)
    is_accepted, shares = typical(blocks.logits, blocks.rows_before, blocks.draft_ids, *blocks.bounds, *greedy)
    assert is_accepted.tolist() == (target_ids[blocks.rows_before] == blocks.draft_ids).tolist()
    assert shares.tolist() == is_accepted.double().tolist()
    targets, drafts, bounds = target_ids.tolist(), blocks.draft_ids.tolist(), blocks.offsets.tolist()
    for block, (start, end) in enumerate(itertools.pairwise(bounds)):
        path, _ = accept_block(targets[start + block : end + block + 1], drafts[start:end])
        assert longest_path(is_accepted[start:end].tolist(), shares[start:end].tolist()) == path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_ids", torch.tensor([4])),
        ("rows", torch.tensor([2])),
        ("rows", torch.tensor([0, 1])),
        ("top_k", torch.zeros(2)),
        ("delta", torch.zeros(3)),
    ],
)
def test_bad_arguments_of_typical_acceptance_are_rejected(name: str, value: torch.Tensor) -> None:
    temperature, top_k, top_p, min_p = columns(2, 1.0, 0, 1.0, 0.0)
    values = {
        "logits": torch.zeros(2, 4),
        "rows": torch.zeros(1, dtype=torch.int64),
        "draft_ids": torch.tensor([1]),
        "epsilon": torch.zeros(2),
        "delta": torch.zeros(2),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    typical(*values.values())
    with pytest.raises(ValueError, match=f"^{name} must"):
        typical(*(values | {name: value}).values())


def test_the_longest_path_by_hand() -> None:
    assert longest_path([], []) == []
    assert longest_path([False, True], [0.0, 1.0]) == [], "a chain ends at a rejected token"
    assert longest_path([True, True, False, True], [0.5] * 4) == [0, 1]
    assert longest_path([True, True, False, True], [0.5] * 4, [-1, -1, 0, 1]) == [1, 3]
    assert longest_path([True, True], [0.3, 0.6], [-1, -1]) == [1], "of equally long ones the likelier"
    assert longest_path([True, True], [0.6, 0.6], [-1, -1]) == [0], "then the first"
    assert longest_path([True, True, True, True], [0.9, 0.1, 0.1, 0.2], [-1, -1, 1, 0]) == [0, 3]


@pytest.mark.parametrize("seed", range(50))
def test_the_longest_path_is_the_papers(seed: int) -> None:
    """Candidates are all paths from the root to a leaf. Each is accepted up to its first refused token; the longest
    accepted is taken, of equally long ones the likeliest."""
    rng = random.Random(seed)
    parents = [rng.randrange(-1, node) for node in range(rng.randrange(1, 14))]
    is_accepted = [rng.random() < 0.7 for _ in parents]
    shares = [rng.uniform(0.01, 1.0) for _ in parents]
    candidates = []
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        candidates.append(path)
    accepted = [list(itertools.takewhile(lambda node: is_accepted[node], path)) for path in candidates]
    longest = max(map(len, accepted))
    likelihoods = {
        tuple(path): sum(math.log(shares[node]) for node in path) for path in accepted if len(path) == longest
    }
    assert longest_path(is_accepted, shares, parents) == list(max(likelihoods, key=likelihoods.__getitem__))
