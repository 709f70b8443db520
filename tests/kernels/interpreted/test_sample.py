"""The Triton sampler chooses the reference's tokens, its log-probabilities are right, a row depends on itself alone."""

from itertools import product

import numpy as np
import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.sample import greedy, sample, token_logprobs
from betoken.kernels.sample.narrowing import narrow
from tests.kernels.sample_cases import SETTINGS, SIZES, as_columns, random_case, unsound_case
from tests.products import covering

UNSOUND = [
    *((1100, settings) for settings in SETTINGS[:4]),
    (3, SETTINGS[4]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in product((3, 1100, 4200), SETTINGS)),
]
"""Sizes of vocabularies and settings for rows that choose nothing."""


def draw(logits: torch.Tensor, settings: dict, device: torch.device) -> list[int]:
    columns = as_columns(logits.shape[0], settings)
    return sample(logits.to(device), **{name: column.to(device) for name, column in columns.items()}).tolist()


def assert_equals_reference(logits: torch.Tensor, settings: dict, device: torch.device, takes_triton) -> None:
    with dispatch.override("reference"):
        expected = draw(logits, settings, torch.device("cpu"))
    with takes_triton():
        assert draw(logits, settings, device) == expected


@pytest.mark.parametrize(("index", "vocab_size"), covering(range(3), SIZES, strength=1))
def test_triton_sampled_tokens_equal_the_reference(
    index: int, vocab_size: int, device: torch.device, takes_triton
) -> None:
    logits, settings = random_case(index, vocab_size)
    assert_equals_reference(logits, settings, device, takes_triton)


@pytest.mark.parametrize("num_rows", [1, 70])
def test_triton_sample_takes_any_number_of_rows(num_rows: int, device: torch.device, takes_triton) -> None:
    num_rows = min(num_rows, 24) if device.type == "cpu" else num_rows
    logits, settings = random_case(num_rows, 63, num_rows)
    assert_equals_reference(logits, settings, device, takes_triton)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [50257, 128256])
def test_triton_sample_takes_large_vocabularies(vocab_size: int, device: torch.device, takes_triton) -> None:
    for index in range(3):
        logits, settings = random_case(index, vocab_size, num_rows=2)
        assert_equals_reference(logits, settings, device, takes_triton)


@pytest.mark.gpu
def test_many_sample_cases_equal_the_reference_on_a_gpu(takes_triton) -> None:
    for vocab_size in (*SIZES, 50257):
        for index in range(60):
            logits, settings = random_case(index, vocab_size, 70)
            assert_equals_reference(logits, settings, torch.device("cuda"), takes_triton)


@pytest.mark.parametrize("top_p", [0.39999998, 0.40000004, 0.7, 0.90000004])
def test_top_p_at_the_very_edge(top_p: float, device: torch.device, takes_triton) -> None:
    """Sums equal to top_p within an ulp: the approximate total cannot decide, the exact one must."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(5, 1)
    assert_equals_reference(logits, {"top_p": top_p}, device, takes_triton)


@pytest.mark.parametrize("settings", [{"top_p": 0.02}, {"top_k": 3}, {"top_k": 40, "top_p": 0.05}, {"min_p": 0.9}])
def test_the_first_sampled_candidate_is_often_dropped(settings: dict, device: torch.device, takes_triton) -> None:
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(7)) * 0.3
    assert_equals_reference(logits, settings, device, takes_triton)


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.3}, {"top_k": 700, "top_p": 0.5, "min_p": 1.0}])
def test_ties_stay_and_the_lowest_id_wins(settings: dict, device: torch.device, takes_triton) -> None:
    logits = torch.full((3, 1100), -1.0)
    logits[1] = 0.0
    logits[2, ::7], logits[2, 1::7] = 0.0, -0.0
    for temperature in (0.0, 3.0):
        assert_equals_reference(logits, {**settings, "temperature": temperature}, device, takes_triton)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype, device: torch.device, takes_triton) -> None:
    logits = torch.full((3, 1300), -1.0, dtype=dtype, device=device)
    logits[0, [1299, 41]] = 2.0
    logits[1, 1299] = 2.0
    with takes_triton():
        assert greedy(logits).tolist() == [41, 1299, 0]


def test_a_triton_sampled_row_does_not_depend_on_the_others(device: torch.device, takes_triton) -> None:
    logits, settings = random_case(4, 1100, num_rows=6)
    with takes_triton():
        together = draw(logits, settings, device)
        for row in (0, 5):
            alone = {name: values[row : row + 1] for name, values in settings.items()}
            assert draw(logits[row : row + 1], alone, device) == together[row : row + 1]


@pytest.mark.parametrize(("vocab_size", "settings"), UNSOUND)
def test_rows_without_a_finite_largest_value_choose_nothing(
    vocab_size: int, settings: dict, device: torch.device, takes_triton
) -> None:
    if device.type == "cpu" and "top_p" not in settings:  # two tiles instead of two chunks of tiles
        vocab_size = min(vocab_size, 1100)
    logits, _ = unsound_case(vocab_size)
    assert_equals_reference(logits, settings, device, takes_triton)


def test_triton_sample_takes_an_empty_batch(device: torch.device, takes_triton) -> None:
    with takes_triton():
        logits = torch.zeros(0, 5, device=device)
        assert draw(logits, {}, device) == [] and greedy(logits).tolist() == []
        assert [part.shape for part in token_logprobs(logits, greedy(logits), 2)] == [(0,), (0, 2), (0, 2)]


def test_a_peaked_row_leaves_a_short_list(device: torch.device) -> None:
    """Only the groups of likely ids are read again, of 63."""
    logits = torch.randn(1, 4000, generator=torch.Generator().manual_seed(3)) * 2
    logits[0, [5, 100, 3999]] = torch.tensor([24.0, 23.0, 22.0])
    logits[0, 700] = 17.0
    for settings in ({"top_p": 0.95}, {"top_k": 3}, {"min_p": 0.05}, {"top_k": 3, "top_p": 0.95}, {"temperature": 0.0}):
        columns = {name: column.to(device) for name, column in as_columns(1, settings).items()}
        del columns["seeds"], columns["positions"]
        left = narrow(logits.to(device), **columns, keeps_top_k=False)
        num_expected = 1 if settings == {"temperature": 0.0} else 3
        assert left.counts.tolist() == [num_expected]
        assert left.groups[0, :num_expected].tolist() == [0, 6, 57][:num_expected]
        assert 17.0 < float(left.floor) < 24.0


@pytest.mark.parametrize("vocab_size", [1, 63, 1000])
def test_logprobs_equal_reference(vocab_size: int, device: torch.device, takes_triton) -> None:
    for index in range(3):
        logits, _ = random_case(index, vocab_size, num_rows=2)
        token_ids = torch.arange(2) * 7919 % vocab_size
        num_top = min(vocab_size, 3 * index)
        with dispatch.override("reference"):
            chosen, top_ids, top_logprobs = token_logprobs(logits, token_ids, num_top)
        with takes_triton():
            got = token_logprobs(logits.to(device), token_ids.to(device), num_top)
        assert got[1].tolist() == top_ids.tolist()
        torch.testing.assert_close(got[0].cpu(), chosen, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(got[2].cpu(), top_logprobs, atol=1e-5, rtol=1e-6)


def test_logprobs_name_masked_ids_last(device: torch.device, takes_triton) -> None:
    logits = torch.full((1, 1100), -torch.inf, device=device)
    logits[0, [1050, 3, 700]] = torch.tensor([1.0, 0.0, 1.0], device=device)
    with takes_triton():
        chosen, top_ids, top_logprobs = token_logprobs(logits, torch.tensor([2], device=device), 6)
    assert top_ids.tolist() == [[700, 1050, 3, 0, 1, 2]]
    assert chosen.tolist() == [-np.inf] and top_logprobs[0, 3:].tolist() == [-np.inf] * 3


def test_logprobs_of_a_row_do_not_depend_on_the_others(device: torch.device, takes_triton) -> None:
    logits, _ = random_case(0, 1001, num_rows=5)
    token_ids = logits.argmax(1)
    with takes_triton():
        together = token_logprobs(logits.to(device), token_ids.to(device), 3)
        for row in (0, 4):
            alone = token_logprobs(logits[row : row + 1].to(device), token_ids[row : row + 1].to(device), 3)
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
