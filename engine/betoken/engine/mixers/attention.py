"""Parts of attention for families that call it from their own code."""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.attention import MASKED_WINDOW, Scoring, current_context


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Query [1, R, Hq, D], key [1, R, H, D], value [1, R, H, E] -> [1, R, Hq * E]."""
    out = current_context().attend(layer, query[0], key[0], value[0], scoring)
    return out.flatten(1)[None]


def rotate_pairs(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows [..., D], whose neighbours are pairs, turned by angles [..., D / 2]."""
    first, second = rows.float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).to(rows.dtype)


def state_window(module: Any) -> None:
    """State the window that a layer's code leaves to its mask."""
    kinds = getattr(module.config, "layer_types", None)
    if not kinds or kinds[module.layer_idx] == "sliding_attention":
        setattr(module, MASKED_WINDOW, module.config.sliding_window)
