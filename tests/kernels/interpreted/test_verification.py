"""Rejection and typical acceptance in Triton decide as their references do, whatever shares the launch."""

import numpy as np
import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.rejection import DraftProbs, rejection
from betoken.kernels.typical import typical
from betoken.kernels.weights import target_weights
from betoken.kernels.weights_kernel import row_weights
from tests.kernels.sample_cases import as_columns, random_case
from tests.kernels.verification_cases import Blocks, columns, make_blocks
from tests.products import slow

LENGTHS = [0, 1, 5, 0, 3, 2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decisions(blocks: Blocks) -> list[list[int]]:
    is_accepted, shares = typical(*blocks.for_typical)
    results = (*rejection(*blocks.for_rejection), is_accepted, shares.nan_to_num(-1.0))
    return [result.tolist() for result in results]


def assert_equals_reference(blocks: Blocks, device: torch.device, takes_triton) -> list[list[int]]:
    with dispatch.override("reference"):
        expected = decisions(blocks)
    with takes_triton():
        assert decisions(blocks.moved(device)) == expected
    return expected


@pytest.mark.parametrize("vocab_size", [1, 63, 1000, *slow(2048)])
def test_triton_verification_equals_the_reference(vocab_size: int, device: torch.device, takes_triton) -> None:
    rng = np.random.default_rng(vocab_size)
    blocks = make_blocks(rng, vocab_size, LENGTHS, DTYPES[vocab_size % 3])
    counts, *_ = assert_equals_reference(blocks, device, takes_triton)
    assert vocab_size == 1 or 0 < sum(counts) < sum(LENGTHS), "both outcomes occur"


def test_triton_verification_takes_many_blocks(device: torch.device, takes_triton) -> None:
    blocks = make_blocks(np.random.default_rng(70), 63, [1, 0] * (6 if device.type == "cpu" else 17))
    assert_equals_reference(blocks, device, takes_triton)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [50257, 128256])
def test_triton_verification_takes_large_vocabularies(vocab_size: int, device: torch.device, takes_triton) -> None:
    blocks = make_blocks(np.random.default_rng(vocab_size), vocab_size, [3, 1, 0])
    assert_equals_reference(blocks, device, takes_triton)


@pytest.mark.parametrize("index", range(6))
def test_totals_equal_the_reference_s_weights(index: int, device: torch.device) -> None:
    """Every filter alone and together, with ties, masked ids and both zeros."""
    logits, settings = random_case(index, 1100)
    row_columns = as_columns(7, settings)
    del row_columns["seeds"], row_columns["positions"]
    expected = target_weights(logits, **row_columns)
    rows = row_weights(logits.to(device), **{name: column.to(device) for name, column in row_columns.items()})
    assert rows.totals.tolist() == expected.totals.tolist()
    assert rows.likeliest.tolist() == logits.float().argmax(dim=1).tolist()


def test_a_whole_block_is_accepted_and_takes_the_target_id(device: torch.device, takes_triton) -> None:
    """Draft and target agree on every token: both modes keep all of a long chain."""
    num_drafts = 40
    draft_ids = torch.arange(num_drafts) % 7
    logits = torch.zeros(num_drafts + 1, 9)
    logits[torch.arange(num_drafts), draft_ids] = 20.0
    noise_columns = (torch.full((num_drafts + 1,), 3), torch.arange(num_drafts + 1))
    head = (logits, torch.full((num_drafts + 1,), 8), draft_ids, torch.tensor([0, num_drafts]))
    blocks = Blocks(
        *head,
        DraftProbs.from_lists([([], [])] * num_drafts),
        [],
        noise_columns,
        columns(num_drafts + 1, 1.0, 0, 1.0, 0.0),
    )
    counts, next_ids, is_accepted, shares = assert_equals_reference(blocks, device, takes_triton)
    assert (counts, next_ids) == ([40], [8])
    assert is_accepted == [True] * 40 and min(shares) > 0.99


def test_excessive_draft_probabilities_fall_back_to_the_target(device: torch.device, takes_triton) -> None:
    blocks = make_blocks(np.random.default_rng(1), 3, [1] * 12)
    logits = torch.tensor([0.5, 0.5, 0.0]).log().repeat(24, 1)
    distributions = [([0, 1, 2], [0.5, 0.5, 0.01])] * 12
    blocks = Blocks(
        logits,
        blocks.target_ids,
        torch.full((12,), 2),
        blocks.offsets,
        DraftProbs.from_lists(distributions),
        distributions,
        blocks.noise_columns,
        columns(24, 1.0, 0, 1.0, 0.0),
    )
    counts, next_ids, *_ = assert_equals_reference(blocks, device, takes_triton)
    assert counts == [0] * 12 and set(next_ids) == {0, 1}


def test_triton_verification_takes_an_empty_batch(device: torch.device, takes_triton) -> None:
    blocks = make_blocks(np.random.default_rng(0), 5, []).moved(device)
    with takes_triton():
        assert decisions(blocks) == [[], [], [], []]


def test_triton_verification_of_a_block_does_not_depend_on_the_others(device: torch.device, takes_triton) -> None:
    blocks = make_blocks(np.random.default_rng(6), 300, [3, 0, 5])
    with takes_triton():
        together = decisions(blocks.moved(device))
        for block, (start, end) in enumerate([(0, 3), (3, 3), (3, 8)]):
            rows = slice(start + block, end + block + 1)
            alone = Blocks(
                blocks.logits[rows],
                blocks.target_ids[rows],
                blocks.draft_ids[start:end],
                torch.tensor([0, end - start]),
                DraftProbs.from_lists(blocks.distributions[start:end]),
                blocks.distributions[start:end],
                tuple(column[rows] for column in blocks.noise_columns),
                tuple(column[rows] for column in blocks.sampling_columns),
            )
            of_blocks, of_tokens = together[:2], together[2:]
            expected = [*([values[block]] for values in of_blocks), *(values[start:end] for values in of_tokens)]
            assert decisions(alone.moved(device)) == expected


def test_a_rejected_token_is_recovered_from_the_residual_distribution(device: torch.device, takes_triton) -> None:
    """Draft distributions over all ids, and draft tokens that they favour far more than the target does."""
    rng = np.random.default_rng(2)
    num_blocks = 24
    target, draft = rng.dirichlet(np.ones(12), (2, num_blocks)).astype(np.float32)
    draft_ids = torch.from_numpy((draft - target).argmax(axis=1))
    distributions = [(list(range(12)), row.tolist()) for row in draft]
    num_rows = 2 * num_blocks
    blocks = Blocks(
        torch.from_numpy(target).log().repeat_interleave(2, dim=0),
        torch.zeros(num_rows, dtype=torch.int64),
        draft_ids,
        torch.arange(num_blocks + 1),
        DraftProbs.from_lists(distributions),
        distributions,
        (torch.arange(num_rows), torch.arange(num_rows)),
        columns(num_rows, 1.0, 0, 1.0, 0.0),
    )
    counts, *_ = assert_equals_reference(blocks, device, takes_triton)
    assert sum(counts) < num_blocks // 2


def test_typical_holds_both_of_its_bounds(device: torch.device, takes_triton) -> None:
    """0.0895 and 0.0905 on both sides of epsilon; a flat row accepts far less than that."""
    flat = [1 / 40] * 40
    peaked = [[0.90, 0.0895, 0.0105], [0.90, 0.0905, 0.0095]]
    rows = [row + [0.0] * (40 - len(row)) for row in (*peaked, flat)]
    logits = torch.tensor(rows).log().repeat_interleave(2, dim=0).to(device)
    nodes = (torch.tensor([0, 2, 4], device=device), torch.ones(3, dtype=torch.int64, device=device))
    bounds = (torch.full((6,), bound, device=device) for bound in (0.09, 0.3))
    with takes_triton():
        is_accepted, shares = typical(
            logits, *nodes, *bounds, *(column.to(device) for column in columns(6, 1.0, 0, 1.0, 0.0))
        )
    assert is_accepted.tolist() == [False, True, True]
    assert shares.tolist() == pytest.approx([0.0895, 0.0905, 1 / 40], rel=1e-5)
