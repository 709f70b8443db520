"""Mamba, both versions, and the hybrids whose layers are theirs unchanged."""

from betoken.engine.families.family import Family
from betoken.engine.mixers.recurrences import keep_head_weight, mamba2
from betoken.engine.mixers.selective_scan import SelectiveScan

_MAMBA2 = {"mamba2_chunk_scan": mamba2}

MAMBA = Family(
    model_types=("mamba",),
    layer_types=frozenset({"mamba", "linear_attention"}),
    mixers={"MambaMixer": SelectiveScan},
    finish=keep_head_weight,
)

MAMBA2 = Family(
    model_types=("mamba2",),
    layer_types=frozenset({"mamba", "mamba2", "linear_attention"}),
    recurrences=_MAMBA2,
    finish=keep_head_weight,
)

JAMBA = Family(
    model_types=("jamba",),
    layer_types=frozenset({"mamba", "linear_attention"}),
    mixers={"JambaMambaMixer": SelectiveScan},
)

BAMBA = Family(
    model_types=("bamba", "granitemoehybrid"),
    layer_types=frozenset({"mamba", "linear_attention"}),
    recurrences=_MAMBA2,
)

NEMOTRON_H = Family(
    model_types=("nemotron_h",),
    layer_types=frozenset({"mamba", "moe", "linear_attention"}),
    recurrences=_MAMBA2,
    draft_tensors=r"mtp\..*",
)
