"""Layers that mix tokens other than by attention, in the place of transformers' own: what they remember lies in pools.

They find the batch through the context of the model's call. They know neither pages nor sequences.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from betoken.engine.mixers.bound import bind_recurrences
from betoken.engine.mixers.handed import Handed, hand_over
from betoken.engine.mixers.lightning import LightningAttention
from betoken.engine.mixers.own_attention import bind_own_attention
from betoken.engine.mixers.rg_lru import RgLru
from betoken.engine.mixers.selective_scan import SelectiveScan
from betoken.engine.mixers.short_conv import ShortConv

_MIXERS: dict[str, Callable[[Any, Handed], nn.Module]] = {
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
    "MambaMixer": SelectiveScan,
    "FalconMambaMixer": SelectiveScan,
    "JambaMambaMixer": SelectiveScan,
    "ZambaMambaMixer": SelectiveScan,
    "MiniMaxLightningAttention": LightningAttention,
    "RecurrentGemmaRecurrentBlock": RgLru,
}
"""What takes the place of a class of transformers."""


_UNNUMBERED = {
    "RecurrentGemmaDecoderLayer": "temporal_block",
    "ZambaHybridLayer": "shared_transf.self_attn",
    "Zamba2HybridLayer": "shared_transformer.self_attn",
}
"""Class of a layer -> what in it mixes tokens and does not know its layer's number."""


def replace_mixers(model: nn.Module) -> None:
    """Put ours in the place of a model's own; it then runs with a context only."""
    handed = hand_over(model)
    bind_recurrences(model, handed)
    bind_own_attention(model)
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            _number(parent)
        for name, child in list(parent.named_children()):
            make = _MIXERS.get(type(child).__name__)
            if make is not None and type(child).__module__.startswith("transformers."):
                setattr(parent, name, make(child, handed))


def _number(layers: nn.ModuleList) -> None:
    for index, layer in enumerate(layers):
        if path := _UNNUMBERED.get(type(layer).__name__):
            mixer: Any = layer.get_submodule(path)
            mixer.layer_idx = index
