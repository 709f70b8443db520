import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from foretoken.training.evaluation import agreement, loss_by_position
from foretoken.training.models import Shape, build_model, logits_of


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
