"""RecurrentGemma's block: a convolution, then a gated linear recurrence of each channel by itself (RG-LRU)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from betoken.engine.mixers.handed import Handed
from betoken.engine.mixers.selective_scan import columns_of, linear_of
from betoken.engine.mixers.short_conv import bias_of, taps_of
from betoken.kernels.linear_recurrence.rule import Recurrence

_RULE = Recurrence(1.0, is_delta=False, normalizes=False, weighs=False)
_DECAY = -8.0
"""Log decay of a channel whose gate and parameter are 1."""


class RgLru(nn.Module):
    """The mixer of one layer, with the layers of the one it replaces."""

    rates: Tensor

    def __init__(self, mixer: Any, handed: Handed) -> None:
        """`mixer`: a `RecurrentGemmaRecurrentBlock`."""
        super().__init__()
        self._handed = handed
        unit = mixer.rg_lru
        self.layer_idx: int = mixer.layer_idx
        self.linear_x, self.linear_y, self.linear_out = mixer.linear_x, mixer.linear_y, mixer.linear_out
        self.act_fn = mixer.act_fn
        self.weight, self.bias = taps_of(mixer.conv_1d), bias_of(mixer.conv_1d)
        weights = torch.cat([unit.input_gate_weight, unit.recurrent_gate_weight], dim=-1).transpose(1, 2)
        biases = torch.cat([unit.input_gate_bias, unit.recurrent_gate_bias], dim=-1)
        self.gates = nn.ModuleList([linear_of(*pair) for pair in zip(weights, biases, strict=True)])
        rates = _DECAY * softplus(unit.recurrent_param.detach().float())
        self.register_buffer("rates", rates.view(-1, 1, columns_of(len(rates))).contiguous(), persistent=False)

    def forward(self, input_states: Tensor, position_ids: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        """[1, R, H] -> [1, R, H]."""
        context = self._handed.context
        y = self.act_fn(self.linear_y(input_states))
        x = context.convolve_states(self.layer_idx, self.linear_x(input_states)[0], self.weight, self.bias)
        parts = zip(self.gates, x.chunk(len(self.gates), dim=-1), strict=True)
        gates = torch.stack([gate(part[None])[0] for gate, part in parts], dim=1)  # [R, heads, 2 * W / heads]
        input_gate, steps = (half.flatten(1) for half in torch.sigmoid(gates).chunk(2, dim=-1))
        steps = steps.float()
        faded = torch.exp(2 * self.rates.flatten() * steps)
        weights = torch.sqrt(1 - faded).masked_fill(position_ids[0][:, None] == 0, 1.0)
        value = x * input_gate * weights.to(x.dtype)
        values, steps = (rows.view(len(rows), -1, self.rates.shape[2]) for rows in (value, steps))
        ones = x.new_ones(x.shape[0], 1, 1)
        out = context.recur(self.layer_idx, ones, ones, values, steps, _RULE, self.rates)
        return self.linear_out(out.flatten(1).to(x.dtype)[None] * y), None
