"""The card and the loss plot of one trained drafter.

Knows how to write down what was measured; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from betoken.training.loop import Progress
from betoken.training.model_card import describe_place
from betoken.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Card:
    """A card's content besides the loss curve."""

    title: str
    summary: str
    """Description, in Markdown."""
    data: str
    """Training data."""
    loss: str
    """Loss and optimiser."""
    tables: Sequence[str]
    """Evaluation on held-out sequences, in Markdown."""


def write_card(card: Card, recipe: Recipe, progress: Progress) -> None:
    """README.md and loss.png in the recipe's output folder."""
    options = recipe.options
    temperatures = ", ".join(f"{temperature:g}" for temperature in options.temperatures)
    measured = "\n\n".join(card.tables)
    text = f"""# {card.title}

{card.summary}

## How good it is

On held-out sequences:

{measured}

## How it was made

    {recipe.command}

- **Target**: `{options.target}`.
- **Data**: {card.data}. Answers are the target's own, made by the engine at temperatures
  {temperatures} in turn, up to {options.max_new_tokens} tokens each.
- **Loss**: {card.loss}
- **Budget**: {progress.num_steps} steps of {options.batch_rows} sequences, {progress.num_tokens / 1e6:.2f}M predicted
  tokens, {progress.elapsed_s / 60:.0f} minutes; seed {options.seed}.
- **Place**: {describe_place(options.device, options.threads, options.note)}.

![loss over training](loss.png)
"""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text(text)
    draw_loss(progress, options.out / "loss.png")


def draw_loss(progress: Progress, path: Path) -> None:
    """Training and held-out loss over tokens, as a small PNG."""
    from matplotlib.figure import Figure  # slow to import, needed once

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([t / 1e6 for t, _ in progress.history], [v for _, v in progress.history], lw=0.8, label="training")
    axes.plot([t / 1e6 for t, _ in progress.held_out], [v for _, v in progress.held_out], "o-", ms=3, label="held out")
    axes.set(xlabel="million tokens", ylabel="loss, nats")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80)
