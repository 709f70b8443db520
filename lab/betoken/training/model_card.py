"""The model card and the loss plot of a finished pair.

Knows how to write down what was measured; it measures nothing but the machine's name and the versions.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from betoken.training.loop import Progress
from betoken.training.models import Shape, product_dtype

POSITION_BOUNDS = (0, 64, 256, 512, 768, 1024)


@dataclass(frozen=True)
class Run:
    """One call of the recipe that the pair went through; `training_runs.json` lists them, the first one first."""

    command: str
    where: str
    """Machine, type of matrix products and versions."""
    seed: int
    target_tokens: int
    target_minutes: float
    draft_tokens: int
    draft_minutes: float


@dataclass(frozen=True)
class TrainedModel:
    """One model of the pair as it is described in the card."""

    name: str
    shape: Shape
    num_parameters: int
    num_tokens: int
    """Predicted tokens of all runs."""
    minutes: float
    position_losses: torch.Tensor
    """Held-out loss in nats at every position, `[window]`."""
    long_from: float
    """Fraction of the budget after which it saw windows of 1024 tokens."""


@dataclass(frozen=True)
class CardFacts:
    """The card's inputs besides the two models."""

    runs: Sequence[Run]
    corpus: dict[str, Any]
    agreement: dict[str, float]
    continued_lr: float
    """Part of the peak learning rate for a run that goes on from an earlier one's weights."""


def bucket_losses(position_losses: torch.Tensor) -> list[tuple[str, float]]:
    """Mean loss in each half-open range of positions, as (label, nats)."""
    bounds = zip(POSITION_BOUNDS[:-1], POSITION_BOUNDS[1:], strict=True)
    return [(f"[{low}, {high})", float(position_losses[low:high].mean())) for low, high in bounds]


def processor_name() -> str:
    """The processor's name in /proc/cpuinfo, if that file exists."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _shape_words(shape: Shape) -> str:
    return (
        f"hidden {shape.hidden_size}, {shape.num_layers} layers, {shape.num_heads} heads, "
        f"{shape.num_kv_heads} KV heads, MLP {shape.mlp_size}, tied"
    )


def describe_place(device: str, threads: int, note: str) -> str:
    """Machine, type of matrix products and versions of this process, with `note` among them."""
    cpu = f"{os.cpu_count()} CPU cores ({processor_name()}), {threads} threads"
    gpu = f", {torch.cuda.get_device_name()}" if device.startswith("cuda") else ""
    products = f"products in {str(product_dtype(torch.device(device).type)).removeprefix('torch.')}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers"))
    return "; ".join(part for part in (cpu + gpu, note, products, versions) if part)


def _model_table(models: Sequence[TrainedModel], facts: CardFacts) -> str:
    return table(
        ["model", "shape", "parameters", "training tokens", "epochs", "minutes"],
        [
            [
                f"`{model.name}`",
                _shape_words(model.shape),
                f"{model.num_parameters / 1e6:.2f}M",
                f"{model.num_tokens / 1e6:.2f}M",
                f"{model.num_tokens / facts.corpus['training']['tokens']:.2f}",
                f"{model.minutes:.0f}",
            ]
            for model in models
        ],
    )


def _loss_table(models: Sequence[TrainedModel]) -> str:
    buckets = [bucket_losses(model.position_losses) for model in models]
    return table(
        ["held-out loss, positions", *(label for label, _ in buckets[0]), "all"],
        [
            [f"`{model.name}`", *(f"{loss:.3f}" for _, loss in row), f"{float(model.position_losses.mean()):.3f}"]
            for model, row in zip(models, buckets, strict=True)
        ],
    )


def _agreement_table(facts: CardFacts) -> str:
    return table(
        ["the same next token", *(name for name in facts.agreement if name != "kl")],
        [["share of held-out positions", *(f"{value:.3f}" for name, value in facts.agreement.items() if name != "kl")]],
    )


def _runs(facts: CardFacts) -> str:
    return "\n\n".join(
        f"    {run.command}\n\n"
        f"Seed {run.seed}: {run.target_tokens / 1e6:.2f}M tokens for the target, {run.draft_tokens / 1e6:.2f}M for the "
        f"draft, on {run.where}."
        for run in facts.runs
    )


def card_text(target: TrainedModel, draft: TrainedModel, facts: CardFacts) -> str:
    """The card in Markdown."""
    training, held_out = facts.corpus["training"], facts.corpus["held_out"]
    return f"""# The embedded model pair

A small target and a draft distilled from it, for demos, tests and benchmarks of Betoken. They continue Python source
code, badly: their worth is that both fit in a repository and that the draft agrees with the target often.

{_model_table((target, draft), facts)}

Llama architecture, bfloat16 safetensors, byte-level BPE of {target.shape.vocab_size} ids (`<|endoftext|>` is id 0),
{target.shape.max_positions} positions.

## How good they are

Loss in nats per token ({held_out["bytes"] / held_out["tokens"]:.2f} bytes per token) of the saved weights on the
held-out files, in windows of {target.position_losses.numel()} tokens, by position in the window:

{_loss_table((target, draft))}

How often draft and target choose the same next token there: `greedy` compares the likeliest tokens, `T` Gumbel-max
samples that share their noise, which is the acceptance rule of coupled verification. Mean KL(target || draft):
{facts.agreement["kl"]:.3f} nats.

{_agreement_table(facts)}

## How they were made

{_runs(facts)}

![training and held-out loss of the last run](loss.png)

A run with `--start-from` goes on from the weights of the pair that it names, with fresh optimizers and
{facts.continued_lr:g} of the learning rate, and wants an empty `--run-dir`. A folder that several runs start from
held what the run before had made. Every run:

- **Data**: the sources of the standard library of Python {platform.python_version()}, sorted by path, and nothing else.
  To train on: {training["files"]} files, {training["bytes"] / 1e6:.1f} MB, {training["tokens"] / 1e6:.2f}M tokens.
  Held out: {held_out["files"]} files, {held_out["tokens"] / 1e3:.0f}k tokens (index % 25 == 7, outside `test/`).
  Corpus {facts.corpus["fingerprint"]}.
- **Target**: next-token prediction. Windows of 256 tokens for the first {100 * target.long_from:.0f} % of the budget,
  1024 for the rest; batches of 4096 tokens, or of `--batch-blocks` times 1024; Muon for the hidden matrices, AdamW
  for embeddings and norms; 2 % warm-up, constant to 40 %, then linear to zero.
- **Draft**: on the same text, 0.9 KL(target || draft) + 0.1 cross-entropy over the whole vocabulary;
  windows of 1024 tokens after {100 * draft.long_from:.0f} % of the budget, all else as for the target.

A budget in minutes depends on the machine's speed and is not reproducible to the bit; one in tokens
(`--target-tokens`, `--draft-tokens`) is, on one machine.
"""


def draw_losses(target: Progress, draft: Progress, path: Path) -> None:
    """Training and held-out loss over tokens of the models that were trained, as a small PNG."""
    from matplotlib.figure import Figure  # slow to import, needed once

    figure = Figure(figsize=(8, 3), layout="constrained")
    losses_of = {"target: cross-entropy": target, "draft: 0.9 KL + 0.1 cross-entropy": draft}
    trained = {title: progress for title, progress in losses_of.items() if progress.num_tokens}
    panels = figure.subplots(1, len(trained), squeeze=False)[0]
    for axes, (title, progress) in zip(panels, trained.items(), strict=True):
        axes.plot([t / 1e6 for t, _ in progress.history], [v for _, v in progress.history], lw=0.8, label="training")
        axes.plot(
            [t / 1e6 for t, _ in progress.held_out], [v for _, v in progress.held_out], "o-", ms=3, label="held out"
        )
        losses = sorted(value for _, value in progress.history + progress.held_out)
        if losses:
            axes.set_ylim(losses[0] - 0.1, losses[int(0.97 * (len(losses) - 1))] + 0.2)
        axes.set(title=title, xlabel="million tokens", ylabel="nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=90)
