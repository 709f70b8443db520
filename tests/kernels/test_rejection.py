"""rejection: hand cases, the algorithm written out, the exact distribution, and what shared noise would do to it."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from betoken.kernels import noise
from betoken.kernels.accept import accept_block
from betoken.kernels.rejection import DraftProbs, rejection
from betoken.kernels.sample import sample
from betoken.kernels.sample.truncated import sample_truncated
from tests.kernels.verification_cases import Blocks, columns, make_blocks, target_distribution

NEUTRAL = (1.0, 0, 1.0, 0.0)
NUM_SEQUENCES = 20_000
VOCAB_SIZE = 8
TARGET = np.random.default_rng(1).normal(size=(VOCAB_SIZE + 1, VOCAB_SIZE)) * 1.2
DRAFT = TARGET + np.random.default_rng(2).normal(size=TARGET.shape)
START = VOCAB_SIZE  # row of the tables that follows the prompt


def by_hand(
    rows: Sequence[Sequence[float]], draft_ids: Sequence[int], distributions: list, seed: int = 0
) -> tuple[int, int]:
    """One block over rows of probabilities; the target ids are 5, 6, 7, ..."""
    logits = torch.tensor(rows, dtype=torch.float32).log()
    num_rows = len(rows)
    num_accepted, next_id = rejection(
        logits,
        torch.arange(5, 5 + num_rows),
        torch.tensor(draft_ids, dtype=torch.int64),
        torch.tensor([0, len(draft_ids)]),
        DraftProbs.from_lists(distributions),
        torch.full((num_rows,), seed),
        torch.arange(num_rows),
        *columns(num_rows, *NEUTRAL),
    )
    return int(num_accepted), int(next_id)


def test_rejection_by_hand() -> None:
    certain: tuple[list[int], list[float]] = ([], [])
    assert by_hand([[0, 1, 0]], [], []) == (0, 5), "no draft: the target id"
    assert by_hand([[0, 1, 0], [1, 0, 0], [0, 0, 1]], [1, 0], [certain, certain]) == (2, 7), "the bonus token"
    assert by_hand([[0, 1, 0], [1, 0, 0], [0, 0, 1]], [1, 2], [certain, certain]) == (1, 0), "the recovered token"
    assert by_hand([[0, 1, 0], [1, 0, 0], [0, 0, 1]], [2, 0], [certain, certain]) == (0, 1), "later ones do not count"
    for seed in range(50):
        equal = ([0, 1, 2], [0.25, 0.5, 0.25])
        assert by_hand([[0.25, 0.5, 0.25], [1, 0, 0]], [1], [equal], seed) == (1, 6), "equal distributions: always"
        _, next_id = by_hand([[0.5, 0.25, 0.25], [1, 0, 0]], [1], [([1], [1.0])], seed)
        assert next_id in (0, 2, 6), "what is recovered is never what was refused"
        accepted, next_id = by_hand([[0.5, 0.0, 0.5], [1, 0, 0]], [1], [([0, 1], [0.5, 0.5])], seed)
        assert (accepted, next_id) == (0, 2), "all of id 0 is spent on the draft"


def test_draft_probabilities_above_the_target_s_everywhere_fall_back_to_the_target() -> None:
    seen = {by_hand([[0.5, 0.5, 0.0], [1, 0, 0]], [2], [([0, 1, 2], [0.5, 0.5, 0.01])], seed) for seed in range(60)}
    assert seen == {(0, 0), (0, 1)}


def written_out(blocks: Blocks) -> tuple[list[int], list[int]]:
    """Algorithm 1 of the paper, one token after another, in float64."""
    seeds, positions = blocks.noise_columns
    num_rows, vocab_size = blocks.logits.shape
    uniforms = noise.uniform(seeds, positions, 1, noise.ACCEPT)[:, 0].tolist()
    gumbels = noise.gumbel(seeds, positions, vocab_size, noise.RECOVERED).double().numpy()
    accepted, next_ids = [], []
    bounds = blocks.offsets.tolist()
    for block, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        next_id = int(blocks.target_ids[end + block])
        for i in range(start, end):
            row, draft_id = i + block, int(blocks.draft_ids[i])
            settings = (float(column[row]) for column in blocks.sampling_columns)
            temperature, top_k, top_p, min_p = settings
            target = target_distribution(blocks.logits[row].float().numpy(), temperature, int(top_k), top_p, min_p)
            draft = np.zeros(vocab_size)
            ids, probs = blocks.distributions[i]
            draft[ids or [draft_id]] = probs or [1.0]
            if target[draft_id] > 0 and uniforms[row] <= target[draft_id] / max(draft[draft_id], 1e-30):
                continue
            residual = np.maximum(target - draft, 0)
            with np.errstate(divide="ignore"):
                next_id = int((np.log(residual if residual.any() else target) + gumbels[row]).argmax())
            end = i
            break
        accepted.append(end - start)
        next_ids.append(next_id)
    return accepted, next_ids


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000])
def test_rejection_equals_the_algorithm_written_out(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    blocks = make_blocks(rng, vocab_size, [0, 1, 5, 0, 3, 2, 4] * 6)
    num_accepted, next_ids = rejection(*blocks.for_rejection)
    assert (num_accepted.tolist(), next_ids.tolist()) == written_out(blocks)


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


def test_greedy_rejection_is_the_equality_test_whatever_the_draft_says() -> None:
    blocks = make_blocks(np.random.default_rng(5), 40, [0, 1, 5, 3, 2, 8] * 8)
    num_rows = blocks.logits.shape[0]
    greedy = columns(num_rows, 0.0, 3, 0.5, 0.5)
    target_ids = sample(blocks.logits, *blocks.noise_columns, *greedy)
    head = (blocks.logits, target_ids, blocks.draft_ids, blocks.offsets)
    expected_accepted, expected_next = accept_chains(target_ids, blocks.draft_ids, blocks.offsets)
    num_accepted, next_ids = rejection(*head, blocks.draft_probs, *blocks.noise_columns, *greedy)
    assert (num_accepted.tolist(), next_ids.tolist()) == (expected_accepted, expected_next)
    assert num_accepted.max() > 1


def test_rejection_in_a_block_does_not_depend_on_the_others() -> None:
    blocks = make_blocks(np.random.default_rng(6), 200, [3, 0, 5, 1])
    together = rejection(*blocks.for_rejection)
    for block in range(4):
        start, end = blocks.offsets[block : block + 2].tolist()
        rows = slice(start + block, end + block + 1)
        alone = rejection(
            blocks.logits[rows],
            blocks.target_ids[rows],
            blocks.draft_ids[start:end],
            torch.tensor([0, end - start]),
            DraftProbs.from_lists(blocks.distributions[start:end]),
            *(column[rows] for column in (*blocks.noise_columns, *blocks.sampling_columns)),
        )
        assert [x.item() for x in alone] == [x[block].item() for x in together]


def two_tokens(drafter: str, settings: tuple[float, int, float, float]) -> np.ndarray:
    """[sequences, 2] what blocks of two draft tokens and a plain step after a refusal emit, one seed per sequence."""
    seeds = torch.arange(NUM_SEQUENCES)
    target = torch.from_numpy(TARGET).to(torch.float32)
    previous = torch.full((NUM_SEQUENCES,), START)
    per_position = columns(NUM_SEQUENCES, *settings)
    rows, draft_ids, distributions = [target[previous]], [], []
    for position in range(2):
        positions = torch.full((NUM_SEQUENCES,), position)
        if drafter == "sparse":  # the four most likely of eight
            logits = torch.from_numpy(DRAFT).to(torch.float32)[previous]
            previous, ids, probs = sample_truncated(logits, 4, seeds, positions, *per_position)
            distributions.append(list(zip(ids.tolist(), probs.tolist(), strict=True)))
        else:  # whatever the previous token was, the next one up
            previous = (previous + 1) % VOCAB_SIZE
            distributions.append([([], [])] * NUM_SEQUENCES)
        draft_ids.append(previous)
        rows.append(target[previous])
    num_rows = 3 * NUM_SEQUENCES
    logits = torch.stack(rows, dim=1).view(num_rows, VOCAB_SIZE)
    row_noise = (seeds.repeat_interleave(3), torch.tensor([0, 1, 2]).repeat(NUM_SEQUENCES))
    row_columns = columns(num_rows, *settings)
    num_accepted, next_ids = rejection(
        logits,
        sample(logits, *row_noise, *row_columns),
        torch.stack(draft_ids, dim=1).flatten(),
        torch.arange(0, 2 * NUM_SEQUENCES + 1, 2),
        DraftProbs.from_lists([pair for both in zip(*distributions, strict=True) for pair in both]),
        *row_noise,
        *row_columns,
    )
    first = torch.where(num_accepted > 0, draft_ids[0], next_ids)
    plain = sample(target[first], seeds, torch.ones_like(seeds), *per_position)
    second = torch.where(num_accepted > 1, draft_ids[1], torch.where(num_accepted > 0, next_ids, plain))
    return torch.stack([first, second], dim=1).numpy()


def pvalue(emitted: np.ndarray, settings: tuple[float, int, float, float]) -> float:
    """Chi-square of the pairs against the target's own joint distribution; 0 if an impossible pair occurs."""
    first = target_distribution(TARGET[START], *settings)
    joint = np.stack([first[i] * target_distribution(TARGET[i], *settings) for i in range(VOCAB_SIZE)])
    counts = np.zeros_like(joint)
    np.add.at(counts, (emitted[:, 0], emitted[:, 1]), 1)
    expected = joint * NUM_SEQUENCES
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 5
    pools = [(table[common], table[~common].sum()) for table in (counts, expected)]
    observed, wanted = (np.append(cells, rest) if pools[1][1] > 0 else cells for cells, rest in pools)
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


SETTINGS = [
    NEUTRAL,
    (0.6, 0, 1.0, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 6, 0.95, 0.05),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafter", ["sparse", "certain"])
def test_the_emitted_tokens_have_the_target_s_distribution(
    drafter: str, settings: tuple[float, int, float, float]
) -> None:
    assert pvalue(two_tokens(drafter, settings), settings) > 1e-4


@pytest.mark.parametrize("stream", ["ACCEPT", "RECOVERED"])
def test_the_distribution_test_finds_the_bias_of_shared_noise(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    monkeypatch.setattr(noise, stream, noise.DRAFTER)
    assert pvalue(two_tokens("sparse", NEUTRAL), NEUTRAL) < 1e-9


def test_drafts_have_the_distribution_that_is_reported() -> None:
    seeds = torch.arange(NUM_SEQUENCES)
    logits = torch.from_numpy(DRAFT[0]).to(torch.float32).repeat(NUM_SEQUENCES, 1)
    settings = (0.8, 6, 1.0, 0.0)
    token_ids, ids, probs = sample_truncated(
        logits, 5, seeds, torch.zeros_like(seeds), *columns(NUM_SEQUENCES, *settings)
    )
    full = target_distribution(DRAFT[0], *settings)
    best = np.argsort(-full)[:5]
    assert ids[0].tolist() == best.tolist()
    np.testing.assert_allclose(probs[0].numpy(), full[best] / full[best].sum(), rtol=1e-6)
    counts = np.bincount(token_ids.numpy(), minlength=VOCAB_SIZE)[best]
    assert counts.sum() == NUM_SEQUENCES
    exact = probs[0].double().numpy()
    assert stats.chisquare(counts, exact / exact.sum() * NUM_SEQUENCES).pvalue > 1e-4


def bad(**changes: object) -> tuple:
    values = {
        "logits": torch.zeros(3, 4),
        "target_ids": torch.zeros(3, dtype=torch.int64),
        "draft_ids": torch.tensor([1, 2]),
        "offsets": torch.tensor([0, 2]),
        "draft_probs": DraftProbs.from_lists([([1], [1.0]), ([], [])]),
        "seeds": torch.zeros(3, dtype=torch.int64),
        "positions": torch.arange(3),
    } | changes
    return (*values.values(), *columns(3, *NEUTRAL))


def test_good_arguments_of_rejection_are_accepted() -> None:
    rejection(*bad())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logits": torch.zeros(4, 4)}, "target_ids"),
        ({"logits": torch.zeros(3, 4, dtype=torch.float64)}, "logits"),
        ({"logits": torch.zeros(4, 3).T}, "logits"),
        ({"target_ids": torch.zeros(2, dtype=torch.int64)}, "target_ids"),
        ({"draft_ids": torch.tensor([1, 4])}, "draft_ids"),
        ({"draft_ids": torch.tensor([1, 2], dtype=torch.int32)}, "draft_ids"),
        ({"offsets": torch.tensor([0, 1])}, "offsets"),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, "logits"),
        ({"draft_probs": DraftProbs.from_lists([([1], [1.0])])}, "draft_probs.offsets"),
        ({"draft_probs": DraftProbs.from_lists([([4], [1.0]), ([], [])])}, "draft_probs.ids"),
        (
            {"draft_probs": DraftProbs(torch.tensor([0, 2, 1]), torch.tensor([1]), torch.tensor([1.0]))},
            "draft_probs.offsets",
        ),
        ({"draft_probs": DraftProbs.from_lists([([0] * 65, [0.0] * 65), ([], [])])}, "draft_probs: a draft token"),
        ({"seeds": torch.zeros(3)}, "seeds"),
        ({"positions": torch.arange(2)}, "positions"),
    ],
)
def test_bad_arguments_of_rejection_are_rejected(changes: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        rejection(*bad(**changes))


def test_a_draft_needs_at_least_one_id() -> None:
    row = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), *columns(1, *NEUTRAL))
    with pytest.raises(ValueError, match="max_ids"):
        sample_truncated(torch.zeros(1, 4), 0, *row)
