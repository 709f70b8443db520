from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from betoken.training.distill import distillation_loss, forward_divergence
from betoken.training.evaluation import agreement
from betoken.training.models import Shape, build_model
from betoken.training.schedule import Budget
from betoken.training.train import TrainSettings, next_token_loss, train
from betoken.training.windows import Windows


def test_forward_divergence_by_hand() -> None:
    target = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).log()
    draft = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
    expected = (0.75 * np.log(1.5) + 0.25 * np.log(0.5)) / 2  # mean over the two positions
    assert forward_divergence(target, draft).item() == pytest.approx(expected, abs=1e-6)
    assert forward_divergence(target, target).item() == pytest.approx(0, abs=1e-7)


def test_distillation_lowers_the_divergence_and_leaves_the_target_alone(
    shape: Shape, windows: Windows, stream: npt.NDArray[np.uint16], tmp_path: Path
) -> None:
    def plan(num_steps: int) -> TrainSettings:
        budget = Budget(tokens=num_steps * windows.batch_tokens)
        return TrainSettings(budget=budget, matrix_lr=0.02, other_lr=4e-3, short_window=8, long_window=32)

    target = build_model(shape, seed=1)
    train(target, next_token_loss, windows, plan(40), tmp_path / "target.pt")
    before = {name: value.clone() for name, value in target.state_dict().items()}

    draft = build_model(Shape(16, 1, 2, 1, 24, shape.vocab_size, shape.max_positions), seed=2)
    start = agreement(target, draft, stream, window=32, max_windows=16)
    train(draft, distillation_loss(target), windows, plan(60), tmp_path / "draft.pt")
    end = agreement(target, draft, stream, window=32, max_windows=16)

    assert end["kl"] < start["kl"] / 2
    assert end["greedy"] > start["greedy"] and end["T=1"] > start["T=1"]
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
