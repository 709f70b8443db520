"""typical: hand cases, and the paper's rule written out in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from betoken.kernels.accept import accept_block
from betoken.kernels.sample import sample
from betoken.kernels.typical import DELTA, EPSILON, typical
from tests.kernels.verification_cases import columns, make_blocks, target_distribution


def by_hand(rows: list[list[float]], draft_ids: list[int]) -> tuple[int, int]:
    """One block over rows of probabilities; the target ids are 5, 6, 7, ..."""
    num_rows = len(rows)
    num_accepted, next_id = typical(
        torch.tensor(rows, dtype=torch.float32).log(),
        torch.arange(5, 5 + num_rows),
        torch.tensor(draft_ids, dtype=torch.int64),
        torch.tensor([0, len(draft_ids)]),
        *columns(num_rows, 1.0, 0, 1.0, 0.0),
    )
    return int(num_accepted), int(next_id)


def test_by_hand() -> None:
    peaked, flat = [0.90, 0.0895, 0.0105], [1 / 40] * 40
    anything = [1.0, 0.0, 0.0]
    assert by_hand([anything], []) == (0, 5)
    assert by_hand([peaked, anything], [0]) == (1, 6)
    assert by_hand([peaked, anything], [1]) == (0, 5), "0.0895 is not above epsilon"
    assert by_hand([[0.90, 0.0905, 0.0095], anything], [1]) == (1, 6), "0.0905 is"
    assert by_hand([flat, flat], [17]) == (1, 6), "a flat target takes what is above 0.3 / 40"
    assert by_hand([peaked, peaked, peaked], [0, 2]) == (1, 6)


def written_out(blocks) -> tuple[list[int], list[int]]:
    accepted, next_ids = [], []
    bounds = blocks.offsets.tolist()
    for block, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        count = 0
        for i in range(start, end):
            row = i + block
            temperature, top_k, top_p, min_p = (float(column[row]) for column in blocks.sampling_columns)
            target = target_distribution(blocks.logits[row].float().numpy(), temperature, int(top_k), top_p, min_p)
            kept = target[target > 0]
            threshold = min(EPSILON, DELTA * np.exp((kept * np.log(kept)).sum()))
            if target[blocks.draft_ids[i]] <= threshold:
                break
            count += 1
        accepted.append(count)
        next_ids.append(int(blocks.target_ids[start + block + count]))
    return accepted, next_ids


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000])
def test_against_the_rule_written_out(vocab_size: int) -> None:
    blocks = make_blocks(np.random.default_rng(vocab_size), vocab_size, [0, 1, 5, 0, 3, 2, 4] * 6)
    num_accepted, next_ids = typical(*blocks.for_typical)
    assert (num_accepted.tolist(), next_ids.tolist()) == written_out(blocks)
    assert num_accepted.max() > 1


def test_the_constants_are_the_papers() -> None:
    assert (round(EPSILON, 7), round(DELTA, 7)) == (0.09, 0.3)


def accept_chains(
    target_ids: torch.Tensor, draft_ids: torch.Tensor, offsets: torch.Tensor
) -> tuple[list[int], list[int]]:
    """(num_accepted, next_ids) by the equality test, block by block."""
    targets, drafts, bounds = target_ids.tolist(), draft_ids.tolist(), offsets.tolist()
    results = [
        accept_block(targets[start + block : end + block + 1], drafts[start:end])
        for block, (start, end) in enumerate(pairwise(bounds))
    ]
    return [len(path) for path, _ in results], [next_id for _, next_id in results]


def test_greedy_is_the_equality_test() -> None:
    blocks = make_blocks(np.random.default_rng(5), 40, [0, 1, 5, 3, 2, 8] * 8)
    greedy = columns(blocks.logits.shape[0], 0.0, 3, 0.5, 0.5)
    target_ids = sample(blocks.logits, *blocks.noise_columns, *greedy)
    expected_accepted, expected_next = accept_chains(target_ids, blocks.draft_ids, blocks.offsets)
    num_accepted, next_ids = typical(blocks.logits, target_ids, blocks.draft_ids, blocks.offsets, *greedy)
    assert (num_accepted.tolist(), next_ids.tolist()) == (expected_accepted, expected_next)


@pytest.mark.parametrize(
    "changes", [{"draft_ids": torch.tensor([4])}, {"top_k": torch.zeros(2)}, {"offsets": torch.tensor([1])}]
)
def test_bad_arguments_are_refused(changes: dict) -> None:
    temperature, top_k, top_p, min_p = columns(2, 1.0, 0, 1.0, 0.0)
    values = {
        "logits": torch.zeros(2, 4),
        "target_ids": torch.zeros(2, dtype=torch.int64),
        "draft_ids": torch.tensor([1]),
        "offsets": torch.tensor([0, 1]),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    typical(*values.values())
    with pytest.raises(ValueError):
        typical(*(values | changes).values())
