"""GPT-J and CodeGen: attention from before transformers' interface."""

from typing import Any

from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.families.family import Family, skip_mask
from betoken.engine.mixers.attention import attend


def _gptj(module: Any) -> None:
    """Replace the product of GPT-J's attention, and of CodeGen's, whose rotation may leave float32."""

    def product(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        rows = [tensor.transpose(1, 2).to(value.dtype) for tensor in (query, key, value)]
        scoring = Scoring(1 / module.scale_attn, 0, 0.0, None)
        out = attend(module.layer_idx, rows[0], rows[1], rows[2], scoring)
        return out.unflatten(-1, value.shape[1::2]).transpose(1, 2), None  # type: ignore[no-untyped-call]

    module._attn = product


GPTJ = Family(
    model_types=("gptj", "codegen"),
    has_own_attention=True,
    is_loaded_eagerly=True,
    bindings={"GPTJAttention": _gptj, "CodeGenAttention": _gptj},
    finish=skip_mask,
)
