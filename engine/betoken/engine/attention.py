"""Our attention as transformers sees it: one registered function that hands each layer's rows to a context.

The context arrives as a keyword of the model call. No mask function is registered, so transformers builds no mask.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from betoken.engine.errors import ModelRefusedError
from betoken.engine.state_shapes import RecurrentShape, StateShape
from betoken.kernels.linear_recurrence.rule import Recurrence

ATTENTION_NAME = "betoken"
"""Value of `attn_implementation` that selects this attention."""

CONTEXT_KEYWORD = "betoken_context"
"""Keyword of the model call that carries the context."""

MASKED_WINDOW = "betoken_window"
"""Field of an attention layer: its window, if the model's code leaves it to a mask."""

# Keywords of an attention function without influence on its result in our forwards.
_INERT_KEYWORDS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "head_mask",
        "output_router_logits",
        "logits_to_keep",
    }
)


class Scoring(NamedTuple):
    """How a layer makes weights of the products of queries and keys."""

    scale: float
    """Factor on the products."""
    window: int
    """Number of visible positions, 0 for all."""
    softcap: float
    """Bound of the scores, 0 for none."""
    sinks: Tensor | None
    """[Hq] scores without a value that take part in every row's softmax; None for none."""
    span: int = 0
    """Length of the spans that positions are cut into; a row sees its own. 0 for no cuts."""
    slopes: Tensor | None = None
    """[Hq] losses of a score with every position of distance; None for none."""


class AttentionContext(Protocol):
    """Inputs from the batch for layers that mix tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write `key` [R, H, D] and `value` [R, H, E], attend `query` [R, Hq, D] causally, return [R, Hq, E]."""
        ...

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Write inputs `x` [R, C], convolve with `weight` [L, C] and `bias` [C] causally, return [R, C]."""
        ...

    def convolve_states(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve for a layer whose earlier inputs are in rings next to its state."""
        ...

    def recur(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        rule: Recurrence,
        rates: Tensor | None = None,
    ) -> Tensor:
        """Run rows through the layer's state: see `betoken.kernels.linear_recurrence`; returns [R, H, E] float32."""
        ...


_running = threading.local()


def set_context(context: AttentionContext | None) -> None:
    """The batch's context for this thread's layers, if the keywords of the model's call do not reach them."""
    _running.context = context


def current_context() -> AttentionContext:
    """The last argument of `set_context` on this thread.

    Raises:
        ModelRefusedError: the model is called without a context.
    """
    context: AttentionContext | None = getattr(_running, "context", None)
    if context is None:
        raise ModelRefusedError("a layer that mixes tokens is called without a batch")
    return context


def select_attention(model: Any, name: str) -> None:
    """Select a registered attention in a model that looks it up by its name."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; `query` is [1, Hq, R, D]. Refuses what it would have to ignore."""
    context: AttentionContext = keywords.pop(CONTEXT_KEYWORD, None) or current_context()
    if attention_mask is not None:
        raise ModelRefusedError("the model passes its attention a mask")
    unknown = sorted(name for name, given in keywords.items() if given is not None and name not in _INERT_KEYWORDS)
    if unknown:
        raise ModelRefusedError(f"the model passes its attention keywords that are not supported: {', '.join(unknown)}")
    if not getattr(module, "is_causal", True) or keywords.get("is_causal") is False:
        raise ModelRefusedError("the model has an attention layer that is not causal")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelRefusedError(f"{type(module).__name__} has no layer index")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [R, heads, D]
    window = sliding_window or getattr(module, MASKED_WINDOW, None) or 0
    scoring = Scoring(float(scale), window, float(softcap or 0.0), s_aux)
    out = context.attend(layer, rows[0], rows[1], rows[2], scoring)
    return out.unsqueeze(0), None


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers; safe to repeat."""
    register: Callable[[str, Callable[..., Any]], None] = AttentionInterface.register
    register(ATTENTION_NAME, _attention_forward)


class ProbeContext:
    """Records the shape of every layer's keys and values; attends within the batch as one separate sequence."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """Layer -> key heads, key size, value size."""
        self.windows: dict[int, int] = {}
        """Layer -> visible positions, 0 = all."""
        self.states: dict[int, StateShape] = {}
        """Layer -> its state in addition to the pages."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Record the layer; the result is of the right shape only."""
        self._check_first(layer)
        if query.shape[1] % key.shape[1]:
            raise ModelRefusedError(f"layer {layer} shares {key.shape[1]} key heads among {query.shape[1]} query heads")
        sinks = scoring.sinks
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ModelRefusedError(f"layer {layer} has sinks {tuple(sinks.shape)} for {query.shape[1]} query heads")
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = scoring.window
        return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Record the layer: its inputs are kept as one head's keys without values."""
        self._check_first(layer)
        self.shapes[layer] = (1, x.shape[1], 0)
        return torch.zeros_like(x)

    def convolve_states(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Record the layer's convolution."""
        shape = self.states.setdefault(layer, StateShape())
        if shape.num_channels:
            raise ModelRefusedError(f"layer {layer} convolves tokens more than once in a forward")
        shape.num_channels, shape.num_taps = x.shape[1], len(weight)
        return torch.zeros_like(x)

    def recur(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        rule: Recurrence,
        rates: Tensor | None = None,
    ) -> Tensor:
        """Record the layer's recurrence."""
        shape = self.states.setdefault(layer, StateShape())
        if shape.recurrence is not None:
            raise ModelRefusedError(f"layer {layer} has more than one recurrence")
        (num_key_heads, key_size), (num_heads, value_size) = key.shape[1:], value.shape[1:]
        shape.recurrence = RecurrentShape(num_key_heads, key_size, num_heads, value_size, gates.shape[-1])
        return torch.zeros(value.shape, dtype=torch.float32, device=value.device)

    def _check_first(self, layer: int) -> None:
        if layer in self.shapes:
            raise ModelRefusedError(f"layer {layer} mixes tokens more than once in a forward")
