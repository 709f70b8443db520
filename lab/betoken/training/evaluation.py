"""Measures of the pair on held-out text: loss by position, and how often the draft agrees with the target.

Knows models and token streams; it trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from betoken.training.models import logits_of


def _rows(stream: npt.NDArray[np.uint16], window: int, max_windows: int | None) -> torch.Tensor:
    """Non-overlapping windows `[N, window + 1]`; the last token of each is only a target."""
    num_windows = (len(stream) - 1) // window
    starts = np.arange(num_windows if max_windows is None else min(num_windows, max_windows)) * window
    return torch.from_numpy(stream[starts[:, None] + np.arange(window + 1)].astype(np.int64))


def _batches(
    model: Any, stream: npt.NDArray[np.uint16], window: int, max_windows: int | None, rows_per_batch: int = 8
) -> Iterator[torch.Tensor]:
    device = next(model.parameters()).device
    for rows in torch.split(_rows(stream, window, max_windows), rows_per_batch):
        yield rows.to(device)


@torch.no_grad()
def loss_by_position(
    model: Any, stream: npt.NDArray[np.uint16], window: int, max_windows: int | None = None
) -> torch.Tensor:
    """Mean next-token loss in nats at every position of the window, `[window]`."""
    model.eval()
    losses = []
    for rows in _batches(model, stream, window, max_windows):
        logits = logits_of(model, rows[:, :-1]).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").cpu())
    model.train()
    return torch.cat(losses).mean(dim=0)


@torch.no_grad()
def agreement(
    target: Any,
    draft: Any,
    stream: npt.NDArray[np.uint16],
    window: int,
    temperatures: tuple[float, ...] = (0.8, 1.0),
    seed: int = 0,
    max_windows: int | None = None,
) -> dict[str, float]:
    """How often both models choose the same next token given the held-out text, in [0, 1].

    `greedy` compares the likeliest tokens; `T=...` compares Gumbel-max samples that share their noise, which is the
    acceptance rule of coupled verification. The mean Kullback-Leibler divergence in nats, `kl`, is included.
    """
    target.eval(), draft.eval()
    generator = torch.Generator().manual_seed(seed)
    totals: dict[str, float] = {}
    num_tokens = 0
    for rows in _batches(target, stream, window, max_windows, rows_per_batch=4):
        p = logits_of(target, rows[:, :-1]).float().log_softmax(-1)
        q = logits_of(draft, rows[:, :-1]).float().log_softmax(-1)
        noise = -torch.log(torch.empty(p.shape).exponential_(generator=generator)).to(p.device)
        counts = {"greedy": (p.argmax(-1) == q.argmax(-1)).sum(), "kl": (p.exp() * (p - q)).sum()}
        for temperature in temperatures:
            chosen = [(logits / temperature + noise).argmax(-1) for logits in (p, q)]
            counts[f"T={temperature:g}"] = (chosen[0] == chosen[1]).sum()
        for name, count in counts.items():
            totals[name] = totals.get(name, 0.0) + float(count)
        num_tokens += p.shape[0] * p.shape[1]
    return {name: total / num_tokens for name, total in totals.items()}
