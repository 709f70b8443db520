"""Finds the layers between which a rank keeps its columns: projections of attention heads, the two halves of an MLP.

Their results are then gathered once, behind the code in between. That code has to treat each column, or each head, by
itself, which is known from the names it uses: other code, such as statistics over all columns, uses others.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from betoken.engine.kv_pool import LayerShape
from betoken.engine.mixers.rebinding import own_forward

_QKV, _GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_MLP_NAMES = frozenset({"act_fn", "down_proj", *_GATED})
_HEAD_NAMES = frozenset(
    {
        *(*_QKV, "o_proj", "q_norm", "k_norm", "apply_rotary_pos_emb", "use_rope", "layer_idx", "update"),
        *("head_dim", "shape", "view", "reshape", "transpose", "contiguous", "chunk", "torch", "sigmoid"),
        *("ALL_ATTENTION_FUNCTIONS", "get_interface", "config", "_attn_implementation", "eager_attention_forward"),
        *("training", "attention_dropout", "scaling", "sliding_window", "attn_logit_softcapping", "getattr"),
    }
)
"""Names in the code of attention layers that treat each head by itself, whatever the number of heads."""


class Chain(NamedTuple):
    """Layers that read all columns, and the layer that reads the results of the code behind them."""

    firsts: tuple[str, ...]
    """Paths; of attention query, key and value."""
    last: str
    layer: int | None
    """Number of the attention layer; None for an MLP."""


def find_chains(model: nn.Module, shapes: Mapping[int, LayerShape]) -> list[Chain]:
    """Return the chains of a model whose layers have keys and values of these shapes."""
    found = []
    for path, module in model.named_modules():
        if _is_mlp(module):
            found.append(Chain(_paths(path, _GATED), f"{path}.down_proj", None))
        elif _is_attention(module, shapes):
            found.append(Chain(_paths(path, _QKV), f"{path}.o_proj", int(module.layer_idx)))
    return found


def _paths(path: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{path}.{name}" for name in names)


def _is_mlp(module: nn.Module) -> bool:
    return _has(module, (*_GATED, "down_proj")) and _uses_only(module, _MLP_NAMES)


def _is_attention(module: Any, shapes: Mapping[int, LayerShape]) -> bool:
    if not _has(module, (*_QKV, "o_proj")) or not _uses_only(module, _HEAD_NAMES):
        return False
    shape = shapes.get(getattr(module, "layer_idx", -1))
    norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None]
    return shape is not None and all(
        weight.shape == (shape.key_size,) for norm in norms for weight in norm.parameters(recurse=False)
    )


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    children = dict(module.named_children())
    return all(name in children for name in names)


def _uses_only(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether the code of a class of transformers uses no other names, unchanged by a family's record."""
    if "forward" in vars(module) or not type(module).__module__.startswith("transformers."):
        return False
    code = own_forward(module).__code__
    texts = [each for each in code.co_consts if isinstance(each, str)]
    return set(code.co_names) <= names and not any("head" in text for text in texts)
