"""The training loop: steps until the budget is spent, with checkpoints to resume from.

Knows batches, a loss function and a schedule; it does not know whether the loss is next-token prediction or
distillation. With a token budget on CPU a resumed run ends in the same state as an uninterrupted one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from betoken.training.models import logits_of
from betoken.training.optimizer import PairOptimizer
from betoken.training.schedule import Budget, learning_rate_scale, window_tokens
from betoken.training.windows import Windows

log = logging.getLogger("betoken.training")

CPU_PART_TOKENS = 2048  # tried: activations then stay in the cache, a sixth less time than 8192 tokens at once

LossFunction = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, input_ids `[B, T]`, target_ids `[B, T]`) -> scalar mean loss in nats per token."""


@dataclass(frozen=True)
class TrainSettings:
    """How one model is trained; rates are peaks."""

    budget: Budget
    matrix_lr: float
    other_lr: float
    weight_decay: float = 0.02
    short_window: int = 256
    long_window: int = 1024
    long_from: float = 0.8
    """Fraction of the budget after which windows are long."""
    checkpoint_every_s: float = 240.0
    log_every_s: float = 20.0
    compile: bool = False


@dataclass
class Progress:
    """The state of a run; saved with every checkpoint."""

    num_steps: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, mean training loss since the entry before)."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, held-out loss), taken at checkpoints."""


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


def save_checkpoint(path: Path, model: Any, optimizer: PairOptimizer, progress: Progress) -> None:
    """Replace the checkpoint at `path` in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(progress)}, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, model: Any, optimizer: PairOptimizer) -> Progress:
    """Restore model and optimizer in place and return the progress; a fresh one where `path` does not exist."""
    if not path.exists():
        return Progress()
    state = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def train(
    model: Any,
    loss_function: LossFunction,
    windows: Windows,
    settings: TrainSettings,
    checkpoint: Path,
    evaluate: Callable[[Any], float] | None = None,
    stop_after_steps: int | None = None,
) -> Progress:
    """Train `model` in place until the budget is spent, resuming from `checkpoint` where it exists.

    `evaluate` gives the held-out loss; `stop_after_steps` interrupts early (the checkpoint then holds the rest).
    """
    optimizer = PairOptimizer(model, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    progress = load_checkpoint(checkpoint, model, optimizer)
    device = next(model.parameters()).device
    step_loss = torch.compile(loss_function, dynamic=False) if settings.compile else loss_function
    model.train()
    losses: list[float] = []
    now = logged = saved = time.monotonic()
    started_at = now - progress.elapsed_s
    logged_tokens = progress.num_tokens
    num_steps_left = stop_after_steps
    while (fraction := settings.budget.fraction(progress.num_tokens, progress.elapsed_s)) < 1 and num_steps_left != 0:
        length = window_tokens(fraction, settings.short_window, settings.long_window, settings.long_from)
        inputs, targets = (ids.to(device) for ids in windows.batch(progress.num_steps, length))
        losses.append(accumulate_gradients(model, step_loss, inputs, targets))
        optimizer.step(learning_rate_scale(fraction))
        now = time.monotonic()
        progress.num_steps += 1
        progress.num_tokens += windows.batch_tokens
        progress.elapsed_s = now - started_at
        num_steps_left = None if num_steps_left is None else num_steps_left - 1
        if now - logged >= settings.log_every_s:
            mean = sum(losses) / len(losses)
            speed = (progress.num_tokens - logged_tokens) / (now - logged)
            progress.history.append((progress.num_tokens, mean))
            log.info(
                "%5.1f %% | step %d | %.2fM tokens | window %d | loss %.3f | %.0f tokens/s",
                100 * fraction, progress.num_steps, progress.num_tokens / 1e6, length, mean, speed,
            )  # fmt: skip
            losses, logged, logged_tokens = [], now, progress.num_tokens
        if now - saved >= settings.checkpoint_every_s:
            _record(checkpoint, model, optimizer, progress, evaluate)
            saved = time.monotonic()
    _record(checkpoint, model, optimizer, progress, evaluate)
    return progress


def _record(
    checkpoint: Path,
    model: Any,
    optimizer: PairOptimizer,
    progress: Progress,
    evaluate: Callable[[Any], float] | None,
) -> None:
    if evaluate is not None and (not progress.held_out or progress.held_out[-1][0] != progress.num_tokens):
        progress.held_out.append((progress.num_tokens, evaluate(model)))
        log.info("held-out loss %.3f after %.2fM tokens", progress.held_out[-1][1], progress.num_tokens / 1e6)
    save_checkpoint(checkpoint, model, optimizer, progress)
