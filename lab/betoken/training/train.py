"""Next-token training of the pair: batches of windows and a loss function in the loop of all recipes.

It does not know whether the loss is next-token prediction or distillation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from betoken.training.loop import Evaluate, LoopSettings, Progress, Step, run_loop
from betoken.training.models import logits_of
from betoken.training.optimizer import PairOptimizer
from betoken.training.schedule import window_tokens
from betoken.training.windows import Windows

CPU_PART_TOKENS = 2048  # tried: activations then stay in the cache, a sixth less time than 8192 tokens at once

LossFunction = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, input_ids `[B, T]`, target_ids `[B, T]`) -> scalar mean loss in nats per token."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(LoopSettings):
    """How one model is trained; rates are peaks."""

    matrix_lr: float
    other_lr: float
    weight_decay: float = 0.02
    short_window: int = 256
    long_window: int = 1024
    long_from: float = 0.8
    """Fraction of the budget after which windows are long."""
    compile: bool = False


def next_token_loss(model: Any, input_ids: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats."""
    return F.cross_entropy(logits_of(model, input_ids).float().flatten(0, 1), target_ids.flatten())


def accumulate_gradients(model: Any, loss_function: LossFunction, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Add the gradients of a batch `[B, T]` and return its mean loss; on CPU a part of the batch at a time."""
    num_windows, length = inputs.shape
    windows_a_part = max(1, CPU_PART_TOKENS // length) if inputs.device.type == "cpu" else num_windows
    total = 0.0
    for part_inputs, part_targets in zip(*(torch.split(ids, windows_a_part) for ids in (inputs, targets)), strict=True):
        loss = loss_function(model, part_inputs, part_targets) * (len(part_inputs) / num_windows)
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def train(
    model: Any,
    loss_function: LossFunction,
    windows: Windows,
    settings: TrainSettings,
    checkpoint: Path,
    evaluate: Evaluate | None = None,
    stop_after_steps: int | None = None,
) -> Progress:
    """Train `model` in place; see `run_loop`."""
    optimizer = PairOptimizer(model, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    device = next(model.parameters()).device
    step_loss = torch.compile(loss_function, dynamic=False) if settings.compile else loss_function

    def gradients(step: int, fraction: float) -> Step:
        length = window_tokens(fraction, settings.short_window, settings.long_window, settings.long_from)
        inputs, targets = (ids.to(device) for ids in windows.batch(step, length))
        loss = accumulate_gradients(model, step_loss, inputs, targets)
        return Step(loss, windows.batch_tokens, f" | window {length}")

    return run_loop(model, optimizer, gradients, settings, checkpoint, evaluate, stop_after_steps)
