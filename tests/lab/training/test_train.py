from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from betoken.training.models import Shape, build_model
from betoken.training.schedule import Budget
from betoken.training.train import CPU_PART_TOKENS, TrainSettings, accumulate_gradients, next_token_loss, train
from betoken.training.windows import Windows


def settings(num_steps: int, windows: Windows) -> TrainSettings:
    budget = Budget(tokens=num_steps * windows.batch_tokens)
    return TrainSettings(budget=budget, matrix_lr=0.02, other_lr=4e-3, short_window=8, long_window=32, log_every_s=0.0)


def test_a_resumed_run_ends_in_the_same_state(shape: Shape, windows: Windows, tmp_path: Path) -> None:
    plan = settings(10, windows)
    whole = build_model(shape, seed=1)
    train(whole, next_token_loss, windows, plan, tmp_path / "whole.pt")

    train(build_model(shape, seed=1), next_token_loss, windows, plan, tmp_path / "parts.pt", stop_after_steps=6)
    resumed = build_model(shape, seed=2)  # another start: everything must come from the checkpoint
    progress = train(resumed, next_token_loss, windows, plan, tmp_path / "parts.pt")

    assert progress.num_steps == 10 and progress.num_tokens == 10 * windows.batch_tokens
    assert len(progress.history) == 10
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_finished_run_is_not_trained_further(shape: Shape, windows: Windows, tmp_path: Path) -> None:
    model = build_model(shape, seed=1)
    train(model, next_token_loss, windows, settings(3, windows), tmp_path / "run.pt")
    again = build_model(shape, seed=2)
    progress = train(again, next_token_loss, windows, settings(3, windows), tmp_path / "run.pt")
    assert progress.num_steps == 3
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


def test_the_loss_falls_and_the_held_out_loss_is_recorded(shape: Shape, windows: Windows, tmp_path: Path) -> None:
    model = build_model(shape, seed=1)
    evaluated = []

    def evaluate(model: object) -> float:
        evaluated.append(model)
        return 1.0

    progress = train(model, next_token_loss, windows, settings(40, windows), tmp_path / "run.pt", evaluate)
    assert progress.history[-1][1] < progress.history[0][1] - 0.5
    assert progress.held_out == [(progress.num_tokens, 1.0)] and len(evaluated) == 1


def test_parts_of_a_batch_have_the_loss_and_gradients_of_the_whole(shape: Shape) -> None:
    length = shape.max_positions
    ids = torch.randint(
        shape.vocab_size, (5 * CPU_PART_TOKENS // length // 2, length + 1), generator=torch.manual_seed(3)
    )
    inputs, targets = ids[:, :-1], ids[:, 1:]
    part_sizes = []

    def float32_loss(model: Any, part: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        part_sizes.append(part.numel())
        return F.cross_entropy(model(input_ids=part).logits.flatten(0, 1), expected.flatten())

    model, whole = build_model(shape, seed=1), build_model(shape, seed=1)
    loss = accumulate_gradients(model, float32_loss, inputs, targets)
    assert part_sizes == [CPU_PART_TOKENS, CPU_PART_TOKENS, CPU_PART_TOKENS // 2]

    whole_loss = float32_loss(whole, inputs, targets)
    torch.autograd.backward(whole_loss)
    assert loss == pytest.approx(whole_loss.item(), rel=1e-6)
    for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-4, atol=1e-7, msg=name)
