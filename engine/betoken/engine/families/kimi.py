"""Kimi Linear and Ling's hybrids: layers of Kimi's delta attention. Kimi-K2.5 is a DeepSeek-V3."""

from betoken.engine.families.family import Family
from betoken.engine.mixers.recurrences import gated_delta_rule

KIMI_LINEAR = Family(
    model_types=("kimi_linear", "bailing_hybrid"),
    layer_types=frozenset({"linear_attention"}),
    recurrences={"chunk_kimi_delta_attention": gated_delta_rule},
)
