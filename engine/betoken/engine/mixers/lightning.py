"""MiniMax's lightning attention: linear attention whose state fades by a constant of each head."""

from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.mixers.handed import Handed
from betoken.kernels.linear_recurrence.rule import Recurrence

_RULE = Recurrence(1.0, is_delta=False, normalizes=False)
_REPLACED = "MiniMaxLightningAttention"
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Buffers that a model's sizes settle. transformers stores them as weights, rounded to the checkpoint's type."""
_STORED_TYPES = (torch.bfloat16, torch.float16)


def decay_names(model: nn.Module) -> set[str]:
    """Names of the buffers that a checkpoint may lack, since transformers computes them."""
    layers = [path for path, module in model.named_modules() if type(module).__name__ == _REPLACED]
    return {f"{path}.{name}" for path in layers for name in _DECAYS}


def restore_decays(model: nn.Module) -> None:
    """Compute the decays again if the checkpoint's are rounded versions of them.

    Each would have its own rounding error, so that a chunk's sums would differ from its rows'.
    """
    for module in model.modules():
        if type(module).__name__ == _REPLACED:
            for name, exact in _exact_decays(module).items():
                stored = getattr(module, name)
                if any(torch.equal(stored, exact.to(dtype).to(stored.dtype)) for dtype in _STORED_TYPES):
                    setattr(module, name, exact.to(stored.dtype))


def _exact_decays(mixer: Any) -> dict[str, Tensor]:
    slopes = mixer.get_slope_rate(device=mixer.slope_rate.device)
    return dict(zip(_DECAYS, (slopes, *mixer.decay_factors(slopes)), strict=True))


def _slopes(mixer: Any) -> Tensor:
    """[H] float32: the exact decays whose rounded form the checkpoint has, or the checkpoint's own."""
    stored: Tensor = mixer.slope_rate.detach()
    exact = _exact_decays(mixer)["slope_rate"]
    return (exact if torch.equal(stored, exact.to(stored.dtype)) else stored).float().flatten()


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
        slopes = _slopes(mixer)
        self.register_buffer("gates", torch.stack([-slopes, torch.ones_like(slopes)], dim=-1), persistent=False)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        """[1, R, H] -> [1, R, H]."""
        heads = self.act_fn(self.qkv_proj(hidden_states))[0].unflatten(-1, (self._num_heads, -1))
        query, key, value = heads.chunk(3, dim=-1)
        gates = self.gates.expand(heads.shape[0], -1, -1)  # a tracer takes len for a constant
        out = self._handed.context.recur(self.layer_idx, query, key, value, gates, _RULE)
        mixed = self.norm(out.flatten(1).to(hidden_states.dtype)[None])
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * mixed), None
