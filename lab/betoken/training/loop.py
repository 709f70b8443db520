"""Steps until the budget is spent, with checkpoints to resume from: the one loop of every recipe.

Knows a model, an optimizer and a function that leaves a step's gradients; it knows no data and no loss. With a token
budget on CPU a resumed run ends in the same state as an uninterrupted one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from betoken.training.schedule import Budget, learning_rate_scale

log = logging.getLogger("betoken.training")


MAX_EVALUATION_SHARE = 0.1
"""Share of a run's time; a checkpoint comes without a held-out loss where evaluating has taken more."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Length of a run and its logging interval."""

    budget: Budget
    checkpoint_every_s: float = 240.0
    log_every_s: float = 20.0


@dataclass
class Progress:
    """The state of a run; saved with every checkpoint."""

    num_steps: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, mean training loss since the entry before)."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, held-out loss), taken at checkpoints and at the end."""


@dataclass(frozen=True, slots=True)
class Step:
    """Loss and size of one step."""

    loss: float
    """Mean loss of the batch, nats."""
    num_tokens: int
    """Predicted tokens of the batch."""
    words: str = ""
    """More for the log."""


Gradients = Callable[[int, float], Step]
"""(step, fraction of the budget spent) -> adds the step's gradients to the model."""
Evaluate = Callable[[Any], float]
"""model -> held-out loss."""


class Optimizer(Protocol):
    """An updater of the model."""

    def step(self, scale: float) -> None:
        """Apply the gradients at `scale` times the peak rates, then drop them."""
        ...

    def state_dict(self) -> list[dict[str, Any]]:
        """The state for `load_state_dict`."""
        ...

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        ...


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """The parameters that training changes, by name."""
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def save_checkpoint(path: Path, model: Any, optimizer: Optimizer, progress: Progress) -> None:
    """Replace the checkpoint at `path` in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {"model": trainable_state(model), "optimizer": optimizer.state_dict(), "progress": vars(progress)}
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, model: Any, optimizer: Optimizer) -> Progress:
    """Restore model and optimizer in place and return the progress; a fresh one where `path` does not exist.

    Raises:
        ValueError: the checkpoint is of a model with other parameters.
    """
    if not path.exists():
        return Progress()
    state = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
    parameters = trainable_state(model)
    if missing := sorted(parameters.keys() ^ state["model"].keys()):
        raise ValueError(f"{path}: parameters differ from the model's: {', '.join(missing[:4])}")
    for name, param in parameters.items():
        param.copy_(state["model"][name])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def run_loop(
    model: Any,
    optimizer: Optimizer,
    gradients: Gradients,
    settings: LoopSettings,
    checkpoint: Path,
    evaluate: Evaluate | None = None,
    stop_after_steps: int | None = None,
) -> Progress:
    """Train `model` in place until the budget is spent, resuming from `checkpoint` if it exists.

    `stop_after_steps` interrupts early (the checkpoint then holds the rest).
    """
    progress = load_checkpoint(checkpoint, model, optimizer)
    model.train()
    losses: list[float] = []
    now = logged = saved = time.monotonic()
    started_at = now - progress.elapsed_s
    logged_tokens = progress.num_tokens
    num_steps_left = stop_after_steps
    recorded_s = 0.0
    while (fraction := settings.budget.fraction(progress.num_tokens, progress.elapsed_s)) < 1 and num_steps_left != 0:
        step = gradients(progress.num_steps, fraction)
        losses.append(step.loss)
        optimizer.step(learning_rate_scale(fraction))
        now = time.monotonic()
        progress.num_steps += 1
        progress.num_tokens += step.num_tokens
        progress.elapsed_s = now - started_at
        num_steps_left = None if num_steps_left is None else num_steps_left - 1
        if now - logged >= settings.log_every_s:
            mean = sum(losses) / len(losses)
            speed = (progress.num_tokens - logged_tokens) / (now - logged)
            progress.history.append((progress.num_tokens, mean))
            log.info(
                "%5.1f %% | step %d | %.2fM tokens%s | loss %.3f | %.0f tokens/s",
                100 * fraction, progress.num_steps, progress.num_tokens / 1e6, step.words, mean, speed,
            )  # fmt: skip
            losses, logged, logged_tokens = [], now, progress.num_tokens
        if now - saved >= settings.checkpoint_every_s:
            is_due = recorded_s <= MAX_EVALUATION_SHARE * progress.elapsed_s
            recorded_s += _record(checkpoint, model, optimizer, progress, evaluate if is_due else None)
            saved = time.monotonic()
    _record(checkpoint, model, optimizer, progress, evaluate)
    return progress


def _record(checkpoint: Path, model: Any, optimizer: Optimizer, progress: Progress, evaluate: Evaluate | None) -> float:
    """Evaluate, save and return the seconds that took."""
    started = time.monotonic()
    if evaluate is not None and (not progress.held_out or progress.held_out[-1][0] != progress.num_tokens):
        progress.held_out.append((progress.num_tokens, evaluate(model)))
        log.info("held-out loss %.3f after %.2fM tokens", progress.held_out[-1][1], progress.num_tokens / 1e6)
    save_checkpoint(checkpoint, model, optimizer, progress)
    return time.monotonic() - started
