from pathlib import Path

import pytest
import torch
from torch import nn

from betoken.training import loop
from betoken.training.loop import LoopSettings, Step, run_loop
from betoken.training.optimizer import PairOptimizer
from betoken.training.schedule import Budget


@pytest.mark.parametrize(("evaluation_s", "most"), [(0.0, 40), (60.0, 2)])
def test_measuring_takes_no_large_part_of_a_run(
    evaluation_s: float, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake clock: a step takes 1 s, a checkpoint is due every 5 s; the end is always measured."""
    now = 0.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    model = nn.Linear(2, 2, bias=False)

    def gradients(step: int, fraction: float) -> Step:
        nonlocal now
        now += 1
        model.weight.grad = torch.ones(2, 2)
        return Step(1.0, 1)

    def evaluate(model: nn.Module) -> float:
        nonlocal now
        now += evaluation_s
        return 2.0

    settings = LoopSettings(budget=Budget(tokens=200), checkpoint_every_s=5.0)
    optimizer = PairOptimizer(model, 0.01, 0.01, 0.0)
    progress = run_loop(model, optimizer, gradients, settings, tmp_path / "run.pt", evaluate)
    assert len(progress.held_out) == most and progress.held_out[-1] == (200, 2.0)
