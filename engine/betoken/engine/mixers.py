"""Layers that mix tokens other than by attention, in the place of transformers' own: what they remember lies in pages.

They find the batch through the context, as attention does. They know neither pages nor sequences.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext
from betoken.engine.errors import ModelRefusedError
from betoken.engine.recurrent_mixers import bind_recurrences


class ShortConv(nn.Module):
    """A gated short convolution, as LFM2's: of projections B, C and x, out(C * convolution(B * x))."""

    def __init__(self, mixer: Any) -> None:
        """`mixer`: a `Lfm2ShortConv`; its layers move here."""
        super().__init__()
        self.layer_idx: int = mixer.layer_idx
        self.in_proj, self.out_proj = mixer.in_proj, mixer.out_proj
        weight = mixer.conv.weight.detach().squeeze(1).T.contiguous()
        self.weight = nn.Parameter(weight, requires_grad=False)  # [L, C]
        bias = mixer.conv.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **keywords: Any) -> Tensor:
        """[1, R, H] -> [1, R, H]."""
        context: AttentionContext | None = keywords.get(CONTEXT_KEYWORD)
        if context is None:
            raise ModelRefusedError("the model does not hand the keywords of its call on to its convolutions")
        if attention_mask is not None:
            raise ModelRefusedError("the model passes its convolutions a mask")
        gate_in, gate_out, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        y = context.convolve(self.layer_idx, (gate_in * x)[0], self.weight, self.bias)
        out: Tensor = self.out_proj(gate_out * y.unsqueeze(0))
        return out


_MIXERS: dict[str, Callable[[Any], nn.Module]] = {
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
}
"""What takes the place of a class of transformers."""


def replace_mixers(model: nn.Module) -> None:
    """Put ours in the place of a model's own; it then runs with a context only."""
    bind_recurrences(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            make = _MIXERS.get(type(child).__name__)
            if make is not None and type(child).__module__.startswith("transformers."):
                setattr(parent, name, make(child))
