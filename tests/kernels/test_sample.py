"""sample: hand cases, both paths bit for bit, the exact distribution, independence from the batch."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from betoken.bench.gpu.poison import poisoned
from betoken.kernels import dispatch, native, noise
from betoken.kernels.sample import IMPLEMENTATIONS, greedy, sample, token_logprobs
from tests.kernels.sample_cases import SETTINGS, SIZES, as_columns, random_case, unsound_case

PATHS = [
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(not native.is_available(), reason="no C compiler")),
]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.override(request.param):
        assert dispatch.select(torch.device("cpu"), IMPLEMENTATIONS)[0] == request.param
        yield request.param


def draw(logits: torch.Tensor, **settings: float | list) -> torch.Tensor:
    """One id per row."""
    return sample(logits, **as_columns(logits.shape[0], settings))


@pytest.mark.skipif(not native.is_available(), reason="no C compiler")
@pytest.mark.parametrize("vocab_size", SIZES)
def test_native_sample_equals_the_reference(vocab_size: int, filled_memory: None) -> None:
    for index in range(60):
        logits, settings = random_case(index, vocab_size)
        with dispatch.override("reference"):
            expected = draw(logits, **settings)
        with dispatch.override("native"):
            assert torch.equal(draw(logits, **settings), expected), index


@pytest.mark.skipif(not native.is_available(), reason="no C compiler")
@pytest.mark.parametrize("vocab_size", SIZES)
def test_native_greedy_sample_equals_the_reference(vocab_size: int, filled_memory: None) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 3, (40, vocab_size), generator=generator).float()  # many are equal
    logits[::4] = torch.randn(10, vocab_size, generator=generator)
    logits[1::4].clamp_(max=-0.0)[:, ::2].mul_(-1).clamp_(max=0.0)  # the largest is a zero of either sign
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with dispatch.override("reference"):
            expected = greedy(logits.to(dtype))
        with dispatch.override("native"):
            assert torch.equal(greedy(logits.to(dtype)), expected)


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """New tensors hold NaN or -7, so that an unwritten output shows."""
    with poisoned():
        yield


@pytest.mark.skipif(not native.is_available(), reason="no C compiler")
@pytest.mark.parametrize("vocab_size", [*SIZES, 1025])
def test_native_sample_noise_equals_the_reference(vocab_size: int, filled_memory: None) -> None:
    seeds, positions = [0, 2**64 - 1, 2**32, 12345], [0, 2**31 - 1, 7, 4095]
    for stream in range(4):
        with dispatch.override("reference"):
            expected = noise.gumbel(seeds, positions, vocab_size, stream)
        with dispatch.override("native"):
            assert torch.equal(noise.gumbel(seeds, positions, vocab_size, stream), expected)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_sampled_token_is_the_argmax_of_logits_plus_noise(path: str, vocab_size: int) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(1))
    for temperature in (0.3, 1.0):
        scores = logits + torch.tensor(temperature) * noise.gumbel([77] * 9, list(range(9)), vocab_size)
        assert torch.equal(draw(logits, seeds=77, temperature=temperature), scores.argmax(1))


def test_greedy_takes_the_lowest_of_equal_ids(path: str) -> None:
    logits = torch.full((3, 300), -1.0)
    logits[0, [299, 41]] = 2.0
    logits[1, 299] = 2.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert greedy(logits.to(dtype)).tolist() == [41, 299, 0]
        assert draw(logits.to(dtype), temperature=0.0, top_k=1, top_p=0.1).tolist() == [41, 299, 0]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocab_size", [1, 3, 300, 5000])
def test_rows_without_a_finite_largest_value_choose_nothing(path: str, vocab_size: int, settings: dict) -> None:
    logits, unsound = unsound_case(vocab_size)
    for dtype in (torch.float32, torch.bfloat16):
        tokens = draw(logits.to(dtype), **settings).tolist()
        assert [row for row, token in enumerate(tokens) if token < 0] == unsound
        if settings == SETTINGS[0]:
            assert greedy(logits.to(dtype)).tolist() == tokens


def support(logits: list[float], **settings: float) -> set[int]:
    """Every id that is ever drawn."""
    rows = torch.tensor([logits] * 3000)
    return set(draw(rows, **settings).tolist())


def test_filters_keep_exactly_the_ids_of_their_definition(path: str) -> None:
    by_weight = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert support(by_weight) == {0, 1, 2, 3}
    assert support(by_weight, top_k=2) == {0, 1}
    assert support(by_weight, top_k=9) == {0, 1, 2, 3}
    assert support(by_weight, top_p=0.39) == {0}
    assert support(by_weight, top_p=0.45) == {0, 1}
    assert support(by_weight, top_p=0.69) == {0, 1}
    assert support(by_weight, top_p=0.75) == {0, 1, 2}
    assert support(by_weight, min_p=0.45) == {0, 1, 2}
    assert support(by_weight, min_p=1.0) == {0}
    assert support(by_weight, top_p=1e-9) == {0}


def test_top_p_applies_to_the_ids_that_top_k_keeps(path: str) -> None:
    by_weight = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    # Of the two survivors 0.4 and 0.3 the first holds 4/7 = 0.571.
    assert support(by_weight, top_k=2, top_p=0.56) == {0}
    assert support(by_weight, top_k=2, top_p=0.58) == {0, 1}


def test_ids_tied_with_a_filter_threshold_stay(path: str) -> None:
    assert support([0.0, 1.0, 0.0, 0.0, -9.0], top_k=2) == {0, 1, 2, 3}
    assert support([0.0, 0.0, 0.0, 0.0], top_p=0.3) == {0, 1, 2, 3}
    assert support([0.0, -0.0, 0.0, -3.0], top_k=1) == {0, 1, 2}


def test_filters_are_decided_at_the_temperature(path: str) -> None:
    by_weight = np.log([0.6, 0.3, 0.1]).tolist()
    assert support(by_weight, top_p=0.7, temperature=1.0) == {0, 1}
    assert support(by_weight, top_p=0.7, temperature=0.5) == {0}  # 0.36 : 0.09 : 0.01
    assert support(by_weight, top_p=0.75, temperature=5.0) == {0, 1, 2}  # 0.39 : 0.34 : 0.27


def test_masked_ids_are_never_drawn(path: str) -> None:
    assert support([0.0, -torch.inf, 0.0, -torch.inf], temperature=50.0) == {0, 2}
    assert support([0.0, -torch.inf, 0.0, -torch.inf], temperature=50.0, top_k=3, top_p=0.999, min_p=0.1) == {0, 2}


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.4}, {"temperature": 3.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2},
     {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "min_p": 0.05}],
)  # fmt: skip
def test_sampled_distribution_is_exact(path: str, settings: dict[str, float]) -> None:
    """Chi-square of 40,000 draws against probabilities computed apart, in float64."""
    logits = np.array([1.5, -0.3, 0.8, 2.1, -1.0, 0.0, 1.1, 0.4, -2.0, 1.9])
    expected = filtered_probabilities(logits, **settings)
    counts = np.zeros(10)
    for seed in (3, 2**40 + 1):
        rows = torch.tensor(logits, dtype=torch.float32).expand(20_000, 10).contiguous()
        counts += np.bincount(draw(rows, seeds=seed, **settings), minlength=10)
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert stats.chisquare(counts[kept], expected[kept] * counts.sum()).pvalue > 1e-3


def filtered_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    weights = np.exp(logits / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    if top_p < 1:
        weights[order[np.cumsum(weights[order]) - weights[order] >= top_p]] = 0
    if min_p:
        weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


def test_a_sampled_row_does_not_depend_on_the_others(path: str) -> None:
    logits, settings = random_case(1, 1000, num_rows=70)
    together = draw(logits, **settings)
    for num_rows in range(1, 71):
        for rows in (slice(0, num_rows), slice(70 - num_rows, 70)):
            part = {name: values[rows] for name, values in settings.items()}
            assert torch.equal(draw(logits[rows].contiguous(), **part), together[rows])


def test_logprobs_of_a_row_do_not_depend_on_the_others() -> None:
    logits, _ = random_case(0, 1001, num_rows=70)
    token_ids = logits.argmax(1)
    together = token_logprobs(logits, token_ids, 20)
    for num_rows in range(1, 71):
        for got, expected in zip(token_logprobs(logits[:num_rows], token_ids[:num_rows], 20), together, strict=True):
            assert torch.equal(got, expected[:num_rows])


def test_logprobs_are_log_softmax() -> None:
    logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(0)) * 5
    token_ids = torch.arange(5)
    chosen, top_ids, top_logprobs = token_logprobs(logits, token_ids, 4)
    exact = torch.log_softmax(logits.double(), dim=1)
    assert torch.allclose(chosen.double(), exact[torch.arange(5), token_ids], atol=1e-5)
    assert torch.equal(top_ids, exact.topk(4, dim=1).indices)
    assert torch.allclose(top_logprobs.double(), exact.topk(4, dim=1).values, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_gpu_samples_the_same_bits(vocab_size: int) -> None:
    for index in range(20):
        logits, settings = random_case(index, vocab_size)
        columns = as_columns(7, settings)
        on_gpu = {name: column.cuda() for name, column in columns.items()}
        assert torch.equal(sample(logits.cuda(), **on_gpu).cpu(), sample(logits, **columns))
        values = noise.gumbel(on_gpu["seeds"], on_gpu["positions"], vocab_size)
        assert torch.equal(values.cpu(), noise.gumbel(columns["seeds"], columns["positions"], vocab_size))


def test_bad_arguments_of_sample_are_rejected() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="logits"):
        draw(torch.zeros(8))
    with pytest.raises(ValueError, match="logits"):
        draw(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        draw(torch.zeros(8, 2).t())
    with pytest.raises(ValueError, match="contiguous"):
        greedy(torch.zeros(8, 2).t())
    with pytest.raises(ValueError, match="temperature"):
        draw(logits, temperature=[1.0])
    with pytest.raises(ValueError, match="top_k"):
        columns = [torch.zeros(2, dtype=torch.int64)] * 2 + [torch.ones(2)] * 4
        sample(logits, *columns)
    with pytest.raises(ValueError, match="num_top"):
        token_logprobs(logits, torch.zeros(2, dtype=torch.int64), 9)
