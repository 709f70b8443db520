from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from betoken.training.evaluation import agreement, loss_by_position
from betoken.training.models import Shape, build_model, logits_of


def test_loss_by_position_is_the_mean_over_windows(shape: Shape, stream: npt.NDArray[np.uint16]) -> None:
    model = build_model(shape, seed=0)
    losses = loss_by_position(model, stream, window=16, max_windows=2)
    rows = torch.from_numpy(np.stack([stream[:17], stream[16:33]]).astype(np.int64))
    with torch.no_grad():
        logits = logits_of(model, rows[:, :-1]).float()
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(2, 16).mean(0)
    assert losses.shape == (16,)
    assert torch.allclose(losses, expected, atol=1e-5)


def test_a_model_agrees_with_itself_and_hardly_with_a_stranger(shape: Shape, stream: npt.NDArray[np.uint16]) -> None:
    model, stranger = build_model(shape, seed=0), build_model(shape, seed=1)
    torch.manual_seed(0)
    for parameter in stranger.parameters():
        torch.nn.init.normal_(parameter)
    same = agreement(model, model, stream, window=16, max_windows=4)
    assert same.pop("kl") == pytest.approx(0, abs=1e-6)
    assert same == {"greedy": 1.0, "T=0.8": 1.0, "T=1": 1.0}
    assert agreement(model, stranger, stream, window=16, max_windows=4)["greedy"] < 0.5


class Constant(nn.Module):
    """Says the same of every next token."""

    def __init__(self, probs: list[float]) -> None:
        super().__init__()
        self.log_probs = nn.Parameter(torch.tensor(probs).log())

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.log_probs.expand(*input_ids.shape, -1))


def test_agreement_under_shared_noise_is_that_of_the_papers_formula() -> None:
    """Pr = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), Daliri, Musco, Suresh, arXiv:2408.07978."""
    target, draft = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    found = agreement(Constant(target), Constant(draft), np.zeros(8001, dtype=np.uint16), window=16)
    for temperature in (0.8, 1.0):
        p, q = (np.asarray(probs) ** (1 / temperature) for probs in (target, draft))
        expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(3))
        assert found[f"T={temperature:g}"] == pytest.approx(expected, abs=0.02)
    assert found["greedy"] == 0.0
    assert found["kl"] == pytest.approx(0.3 * np.log(2.5), abs=1e-5)
