"""BLOOM: attention from before transformers' interface, whose scores fall with distance."""

import sys
from typing import Any

from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.families.family import Family, skip_mask
from betoken.engine.mixers.attention import attend


def _bloom(module: Any) -> None:
    """Replace BLOOM's attention, whose scores fall with distance."""
    slopes: Tensor = sys.modules[type(module).__module__]._get_alibi_slopes(
        module.num_heads, module.dense.weight.device
    )
    scoring = Scoring(module.inv_norm_factor, 0, 0.0, None, 0, slopes.float().flatten())

    def forward(hidden_states: Tensor, residual: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        query, key, value = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, -1)).unbind(3)
        return residual + module.dense(attend(module.layer_idx, query, key, value, scoring)), None

    module.forward = forward


def _bloom_gelu(module: Any) -> None:
    """Leave out the gradient of BLOOM's activation, which no tracer passes."""
    module.forward = sys.modules[type(module).__module__].bloom_gelu_forward


def _find_fault(config: Any) -> str | None:
    if config.pretraining_tp > 1 and config.slow_but_exact:
        return "slow_but_exact = true: its products are cut into pieces"
    return None


BLOOM = Family(
    model_types=("bloom",),
    find_fault=_find_fault,
    has_own_attention=True,
    is_loaded_eagerly=True,
    bindings={"BloomAttention": _bloom, "BloomGelu": _bloom_gelu},
    finish=skip_mask,
)
