"""MiniMax's lightning attention: linear attention whose state fades by a constant of each head."""

from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.mixers.handed import Handed
from betoken.kernels.linear_recurrence.rule import Recurrence

_RULE = Recurrence(1.0, is_delta=False, normalizes=False)


class LightningAttention(nn.Module):
    """The mixer of one layer, with the layers of the one it replaces."""

    gates: Tensor

    def __init__(self, mixer: Any, handed: Handed) -> None:
        """`mixer`: a `MiniMaxLightningAttention`."""
        super().__init__()
        self._handed = handed
        self.layer_idx: int = mixer.layer_idx
        self._num_heads: int = mixer.num_attention_heads
        self.act_fn, self.norm = mixer.act_fn, mixer.norm
        self.qkv_proj, self.out_proj, self.output_gate = mixer.qkv_proj, mixer.out_proj, mixer.output_gate
        slopes = mixer.slope_rate.detach().float().flatten()
        self.register_buffer("gates", torch.stack([-slopes, torch.ones_like(slopes)], dim=-1), persistent=False)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        """[1, R, H] -> [1, R, H]."""
        heads = self.act_fn(self.qkv_proj(hidden_states))[0].unflatten(-1, (self._num_heads, -1))
        query, key, value = heads.chunk(3, dim=-1)
        gates = self.gates.expand(heads.shape[0], -1, -1)  # a tracer takes len for a constant
        out = self._handed.context.recur(self.layer_idx, query, key, value, gates, _RULE)
        mixed = self.norm(out.flatten(1).to(hidden_states.dtype)[None])
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * mixed), None
