"""The mixer of Mamba-1: a convolution, then a state with a separate decay for each element.

Mamba, Falcon-Mamba, Jamba and Zamba differ in norms and in the number of channel groups with separate projections.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from betoken.engine.mixers.handed import Handed
from betoken.engine.mixers.short_conv import bias_of, taps_of
from betoken.kernels.linear_recurrence.rule import Recurrence

_RULE = Recurrence(1.0, is_delta=False, normalizes=False)
_MOST_COLUMNS = 128
"""Channels of a head of the recurrence: the heads of a state are computed side by side."""


def columns_of(num_channels: int) -> int:
    """Channels of a head: the largest power of two that divides them, within a limit."""
    return min(_MOST_COLUMNS, num_channels & -num_channels)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of these weights [N, K], which a device then replaces as it does a model's own."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    return layer


class SelectiveScan(nn.Module):
    """The mixer of one layer, with the layers of the one it replaces."""

    rates: Tensor

    def __init__(self, mixer: Any, handed: Handed) -> None:
        """`mixer`: a `MambaMixer` or one made after it."""
        super().__init__()
        self._handed = handed
        self.layer_idx: int = mixer.layer_idx
        self._num_states: int = mixer.ssm_state_size
        self._has_pairs = hasattr(mixer, "n_mamba_heads")  # Zamba's projection alternates between input and gate
        self.in_proj, self.out_proj, self.act = mixer.in_proj, mixer.out_proj, mixer.act
        self.weight, self.bias = taps_of(mixer.conv1d), bias_of(mixer.conv1d)
        if self._has_pairs:
            steps = zip(mixer.dt_proj_weight, mixer.dt_proj_bias, strict=True)
            self.x_proj = nn.ModuleList([linear_of(weight, None) for weight in mixer.x_proj_weight])
            self.dt_proj = nn.ModuleList([linear_of(weight, bias) for weight, bias in steps])
        else:
            self.x_proj, self.dt_proj = nn.ModuleList([mixer.x_proj]), nn.ModuleList([mixer.dt_proj])
        self.dt_norm, self.b_norm, self.c_norm = (
            getattr(mixer, f"{name}_layernorm", nn.Identity()) for name in ("dt", "b", "c")
        )
        rates = -mixer.A_log.detach().float().exp().flatten(0, -2)  # [I, D]
        self._columns = columns_of(len(rates) // len(self.x_proj))
        rates = rates.view(-1, self._columns, self._num_states).transpose(1, 2).contiguous()
        self.register_buffer("rates", rates, persistent=False)
        self.skip = nn.Parameter(mixer.D.detach().float().flatten(), requires_grad=False)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        """[1, R, H] -> [1, R, H]."""
        context = self._handed.context
        projected = self.in_proj(hidden_states)[0]
        x, gate = projected.unflatten(-1, (-1, 2)).unbind(-1) if self._has_pairs else projected.chunk(2, dim=-1)
        x = self.act(context.convolve_states(self.layer_idx, x.contiguous(), self.weight, self.bias))
        steps, keys, queries = (torch.cat(parts, dim=1) for parts in zip(*self._selected(x), strict=True))
        values, steps = (rows.unflatten(-1, (-1, self._columns)) for rows in (x, steps.float()))
        out = context.recur(self.layer_idx, queries, keys, values, steps, _RULE, self.rates)
        out = (out.flatten(1) + x.float() * self.skip) * silu(gate)
        mixed: Tensor = self.out_proj(out.to(hidden_states.dtype)[None])
        return mixed

    def _selected(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Steps of each group of channels [R, I / G], its keys [R, 1, D] and queries [R, 1, D]."""
        selected = []
        parts = x.chunk(len(self.x_proj), dim=-1)
        for part, x_proj, dt_proj in zip(parts, self.x_proj, self.dt_proj, strict=True):
            projected = x_proj(part[None])
            rank = projected.shape[-1] - 2 * self._num_states
            step, key, query = projected.split([rank, self._num_states, self._num_states], dim=-1)
            step = softplus(dt_proj(self.dt_norm(step)))[0]
            selected.append((step, self.b_norm(key)[0, :, None], self.c_norm(query)[0, :, None]))
        return selected
