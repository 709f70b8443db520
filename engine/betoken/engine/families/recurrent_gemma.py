"""RecurrentGemma: blocks of a convolution and a gated linear recurrence."""

from betoken.engine.families.family import Family
from betoken.engine.mixers.rg_lru import RgLru

RECURRENT_GEMMA = Family(
    model_types=("recurrent_gemma",),
    layer_types=frozenset({"linear_attention"}),
    mixers={"RecurrentGemmaRecurrentBlock": RgLru},
    unnumbered={"RecurrentGemmaDecoderLayer": "temporal_block"},
)
