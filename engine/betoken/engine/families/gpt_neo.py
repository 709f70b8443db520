"""GPT-Neo: attention from before transformers' interface, unscaled; every other layer has a window."""

from typing import Any

from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.families.family import Family, skip_mask
from betoken.engine.mixers.attention import attend


def _gpt_neo(module: Any) -> None:
    """Replace the product of GPT-Neo's attention, whose scores are not scaled; every other layer has a window."""
    window = module.config.window_size if module.attention_type == "local" else 0
    module.bias = None  # the mask: one number for each pair of positions

    def product(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        out = attend(module.layer_id, rows[0], rows[1], rows[2], Scoring(1.0, window, 0.0, None))
        return out.unflatten(-1, value.shape[1::2]).transpose(1, 2), None  # type: ignore[no-untyped-call]

    module._attn = product


GPT_NEO = Family(
    model_types=("gpt_neo",),
    has_own_attention=True,
    is_loaded_eagerly=True,
    bindings={"GPTNeoSelfAttention": _gpt_neo},
    finish=skip_mask,
)
