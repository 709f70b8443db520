"""LFM2 and LFM3: gated short convolutions between layers of attention."""

from betoken.engine.families.family import Architecture, Family
from betoken.engine.mixers.short_conv import ShortConv

LFM = Family(
    model_types=("lfm2", "lfm2_moe", "lfm3"),
    multimodal=("lfm2_vl", "lfm3_vl"),
    layer_types=frozenset({"conv"}),
    mixers=dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), ShortConv),
    gguf={"lfm2": Architecture("lfm2")},
)
