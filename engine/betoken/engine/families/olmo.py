"""OLMo Hybrid: layers of Gated DeltaNet between layers of attention."""

from betoken.engine.families.family import Family
from betoken.engine.mixers.recurrences import gated_delta_rule

OLMO_HYBRID = Family(
    model_types=("olmo_hybrid",),
    layer_types=frozenset({"linear_attention"}),
    recurrences={"torch_chunk_gated_delta_rule": gated_delta_rule},
)
