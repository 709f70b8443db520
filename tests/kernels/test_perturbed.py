"""perturbed_top: hand cases, `sample` as its first column, both paths id for id, the shares."""

from collections.abc import Iterator

import pytest
import torch

from betoken.kernels import dispatch, native, noise
from betoken.kernels.sample import sample
from betoken.kernels.sample.perturbed import IMPLEMENTATIONS, perturbed_top
from tests.kernels.sample_cases import SIZES, as_columns, random_case

NEEDS_NATIVE = pytest.mark.skipif(not native.is_available(), reason="no C compiler")


@pytest.fixture(params=["reference", pytest.param("native", marks=NEEDS_NATIVE)])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.override(request.param):
        assert dispatch.select(torch.device("cpu"), IMPLEMENTATIONS)[0] == request.param
        yield request.param


def top(
    logits: torch.Tensor, num_top: int, scale: float = 1.0, **settings: float | list
) -> tuple[torch.Tensor, torch.Tensor]:
    return perturbed_top(logits, num_top, scale, **as_columns(logits.shape[0], settings))


def test_greedy_rows_are_ranked_by_their_logits_and_shares_are_probabilities(path: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -torch.inf, 5.0, -torch.inf]])
    ids, log_shares = top(logits, 3, temperature=0.0)
    assert ids.tolist() == [[1, 3, 2], [2, 0, 0]], "the lower of equals first; masked ids never"
    probs = logits.softmax(dim=1)
    assert log_shares[0].exp().tolist() == pytest.approx(probs[0, [1, 3, 2]].tolist(), rel=1e-5)
    assert log_shares[1, :2].exp().tolist() == pytest.approx(probs[1, [2, 0]].tolist(), rel=1e-5)
    assert log_shares[1, 2] == -torch.inf


def test_a_noise_scale_below_one_raises_the_first_probability(path: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.5]])
    _, log_shares = top(logits, 2, scale=0.5, temperature=0.0)
    assert log_shares[0].exp().tolist() == pytest.approx((2 * logits).softmax(dim=1)[0, [3, 1]].tolist(), rel=1e-5)


def test_sampled_rows_are_ranked_with_their_noise(path: str) -> None:
    logits = torch.linspace(-2, 2, 50)[None]
    ids, log_shares = top(logits, 4, seeds=5, positions=[17], temperature=0.7)
    scores = logits + torch.tensor(0.7) * noise.gumbel([5], [17], 50)
    assert ids[0].tolist() == scores[0].argsort(descending=True)[:4].tolist()
    assert log_shares[0].tolist() == pytest.approx(scores.log_softmax(dim=1)[0, ids[0]].tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_first_is_the_sampled_token_and_a_longer_list_begins_with_a_shorter(path: str, vocab_size: int) -> None:
    for index in range(40):
        logits, settings = random_case(index, vocab_size)
        ids, log_shares = top(logits, 6, **settings)
        assert torch.equal(ids[:, 0], sample(logits, **as_columns(logits.shape[0], settings))), index
        shorter, _ = top(logits, 2, **settings)
        assert torch.equal(ids[:, :2], shorter), index
        assert bool((log_shares <= 0).all()) and bool((log_shares[:, 1:] <= log_shares[:, :-1]).all())
        assert bool((log_shares.exp().sum(dim=1) < 1 + 1e-4).all())


@NEEDS_NATIVE
@pytest.mark.parametrize("vocab_size", SIZES)
def test_native_perturbed_top_equals_the_reference(vocab_size: int) -> None:
    for index in range(60):
        logits, settings = random_case(index, vocab_size)
        with dispatch.override("reference"):
            expected_ids, expected_shares = top(logits, 5, scale=0.6, **settings)
        with dispatch.override("native"):
            ids, log_shares = top(logits, 5, scale=0.6, **settings)
        assert torch.equal(ids, expected_ids), index
        torch.testing.assert_close(log_shares, expected_shares, rtol=1e-4, atol=1e-4)


def test_bad_arguments_of_perturbed_top_are_rejected() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="num_top must be at least 1, got 0"):
        top(logits, 0)
    with pytest.raises(ValueError, match=r"scale must be above 0, got 0\.0"):
        top(logits, 1, scale=0.0)
    with pytest.raises(ValueError, match="seeds must be contiguous"):
        perturbed_top(logits, 1, 1.0, **as_columns(3, {}))
    with pytest.raises(ValueError, match="logits must be"):
        top(logits.long(), 1)
