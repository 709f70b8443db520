"""Finds the layers between which a rank keeps its columns: projections of attention heads, the two halves of an MLP.

Their results are then gathered once, behind the code in between. That code has to treat each column, or each head, by
itself, which is known from the names it uses: other code, such as statistics over all columns, uses others.
"""

from typing import Any, NamedTuple

from torch import nn

from betoken.engine.families import family_of
from betoken.engine.families.family import Family
from betoken.engine.mixers.attention import state_window
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
    key_size: int | None
    """Width of a key head; None for an MLP."""


def find_chains(model: Any) -> list[Chain]:
    """Return the chains of a model whose mixers have not been replaced; its weights may be on the meta device."""
    found, family = [], family_of(model.config.model_type)
    for path, module in model.named_modules():
        if not _has_own_code(module, family):
            continue
        if _is_mlp(module):
            found.append(Chain(_paths(path, _GATED), f"{path}.down_proj", None))
        elif _is_attention(module):
            found.append(Chain(_paths(path, _QKV), f"{path}.o_proj", module.head_dim))
    return found


def _paths(path: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{path}.{name}" for name in names)


def _is_mlp(module: nn.Module) -> bool:
    return _has(module, (*_GATED, "down_proj")) and _uses_only(module, _MLP_NAMES)


def _is_attention(module: Any) -> bool:
    if not _has(module, (*_QKV, "o_proj")) or not _uses_only(module, _HEAD_NAMES) or not hasattr(module, "head_dim"):
        return False
    norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None]
    return all(weight.shape == (module.head_dim,) for norm in norms for weight in norm.parameters(recurse=False))


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    children = dict(module.named_children())
    return all(name in children for name in names)


def _has_own_code(module: nn.Module, family: Family) -> bool:
    """Whether a class of transformers runs its own code, which the family's record does not replace."""
    name = type(module).__name__
    is_bound = family.bindings.get(name, state_window) is not state_window
    return type(module).__module__.startswith("transformers.") and name not in family.mixers and not is_bound


def _uses_only(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether a module's code uses no other names."""
    code = own_forward(module).__code__
    texts = [each for each in code.co_consts if isinstance(each, str)]
    return set(code.co_names) <= names and not any("head" in text for text in texts)
