"""Zamba, both versions: Mamba layers, and shared attention that does not know its layer's number."""

from betoken.engine.families.family import Family
from betoken.engine.mixers.recurrences import mamba2
from betoken.engine.mixers.selective_scan import SelectiveScan

_LAYER_TYPES = frozenset({"mamba", "hybrid", "linear_attention"})

ZAMBA = Family(
    model_types=("zamba",),
    layer_types=_LAYER_TYPES,
    mixers={"ZambaMambaMixer": SelectiveScan},
    unnumbered={"ZambaHybridLayer": "shared_transf.self_attn"},
)

ZAMBA2 = Family(
    model_types=("zamba2",),
    layer_types=_LAYER_TYPES,
    recurrences={"mamba2_chunk_scan": mamba2},
    unnumbered={"Zamba2HybridLayer": "shared_transformer.self_attn"},
)
