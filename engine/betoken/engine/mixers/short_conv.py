"""LFM2's gated short convolution."""

from typing import Any

from torch import Tensor, nn

from betoken.engine.errors import ModelRefusedError
from betoken.engine.mixers.handed import Handed


def taps_of(convolution: Any) -> nn.Parameter:
    """Weights [L, C] of a causal convolution of each channel by itself, from the oldest input to the row's own."""
    return nn.Parameter(convolution.weight.detach().squeeze(1).T.contiguous(), requires_grad=False)


def bias_of(convolution: Any) -> nn.Parameter | None:
    """The convolution's bias [C], if it has one."""
    bias = convolution.bias
    return None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)


class ShortConv(nn.Module):
    """A gated short convolution, as LFM2's: of projections B, C and x, out(C * convolution(B * x))."""

    def __init__(self, mixer: Any, handed: Handed) -> None:
        """`mixer`: a `Lfm2ShortConv`; its layers move here."""
        super().__init__()
        self._handed = handed
        self.layer_idx: int = mixer.layer_idx
        self.in_proj, self.out_proj = mixer.in_proj, mixer.out_proj
        self.weight, self.bias = taps_of(mixer.conv), bias_of(mixer.conv)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **keywords: Any) -> Tensor:
        """[1, R, H] -> [1, R, H]."""
        if attention_mask is not None:
            raise ModelRefusedError("the model passes its convolutions a mask")
        gate_in, gate_out, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        y = self._handed.context.convolve(self.layer_idx, (gate_in * x)[0], self.weight, self.bias)
        out: Tensor = self.out_proj(gate_out * y.unsqueeze(0))
        return out
