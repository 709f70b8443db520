"""Layers with a recurrent state: transformers' own code, with our functions in the place of its kernels.

The families of Gated DeltaNet and of Mamba-2 call module-level functions for their convolution and their recurrence,
and hand them the keywords of the model's call. Each layer's forward is bound to functions of ours instead, which find
the batch through the context among those keywords. Nothing of transformers is changed.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN
from transformers.utils.generic import ModelOutput

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext
from betoken.engine.errors import ModelRefusedError
from betoken.kernels.linear_recurrence.rule import Recurrence

_CONVOLUTION = "causal_conv1d_fn"


class _Layer:
    """The functions of one layer."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> Tensor:
        """transformers' `causal_conv1d_fn`: [1, C, R] -> [1, C, R]."""
        x = hidden_states[0].T.contiguous()
        y = _context(keywords).convolve_states(self._layer, x, weight.T.contiguous().to(x.dtype), bias)
        if activation is not None:
            y = ACT2FN[activation](y)
        return y.T[None]

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: [1, R, H, E]."""
        _refuse(initial_state)
        decay = g[0].float() if g.dim() == 4 else g[0].float()[..., None]  # Kimi's is one for each row of the state
        gates = torch.cat([decay, beta[0].float()[..., None]], dim=-1)
        rule = Recurrence(query.shape[-1] ** -0.5, is_delta=True, normalizes=use_qk_l2norm_in_kernel)
        out = _context(keywords).recur(self._layer, query[0], key[0], value[0], gates, rule)
        return out[None].to(value.dtype), None

    def mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 (transformers' name)
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        z: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        """transformers' `mamba2_chunk_scan`: [1, R, H, P] float32."""
        _refuse(initial_states, z, return_final_states or None)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = softplus(dt)
        step = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])[0].float()
        gates = torch.stack([step * A.float(), step], dim=-1)
        rule = Recurrence(1.0, is_delta=False, normalizes=False)
        x = hidden_states[0]
        out = _context(keywords).recur(self._layer, C[0], B[0], x, gates, rule)
        if D is not None:
            out = out + D.float()[:, None] * x.float()
        return out[None]


_RECURRENCES: dict[str, Callable[[_Layer], Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": lambda layer: layer.gated_delta_rule,
    "chunk_kimi_delta_attention": lambda layer: layer.gated_delta_rule,
    "mamba2_chunk_scan": lambda layer: layer.mamba2,
}
"""Name of a recurrence in transformers -> ours."""


def bind_recurrences(model: nn.Module) -> None:
    """Bind every layer with a recurrence to our functions; the model then runs with a context only.

    Raises:
        ModelRefusedError: a layer's code is not as it was when this was written.
    """
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType) or not type(module).__module__.startswith("transformers."):
            continue
        called = {name for name in forward.__code__.co_names if name in _RECURRENCES and name in forward.__globals__}
        if called:
            _bind(module, forward, called)
    if type(model).__name__ == "Mamba2ForCausalLM":
        _hand_on_keywords(model)


def _hand_on_keywords(model: Any) -> None:
    """Give the pure Mamba-2 model a forward that hands its keywords on to its layers; transformers' own drops them."""

    def forward(
        input_ids: Tensor, logits_to_keep: int | Tensor = 0, output_hidden_states: Any = None, **keywords: Any
    ) -> ModelOutput:
        output = model.backbone(
            input_ids, output_hidden_states=bool(output_hidden_states), return_dict=True, **keywords
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = model.lm_head(output.last_hidden_state[:, kept].to(model.dtype))
        return ModelOutput(  # type: ignore[no-untyped-call]
            logits=logits.float(), hidden_states=output.hidden_states
        )

    model.forward = forward


def _bind(module: nn.Module, forward: FunctionType, called: set[str]) -> None:
    index = getattr(module, "layer_idx", None)
    takes_keywords = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(forward).parameters.values()
    )
    if index is None or not takes_keywords:
        raise ModelRefusedError(f"{type(module).__name__} has no layer index or does not hand on the call's keywords")
    layer = _Layer(int(index))
    ours = {_CONVOLUTION: layer.convolve, **{name: _RECURRENCES[name](layer) for name in called}}
    bound = FunctionType(
        forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(bound, module)


def _context(keywords: dict[str, Any]) -> AttentionContext:
    context: AttentionContext | None = keywords.get(CONTEXT_KEYWORD)
    if context is None:
        raise ModelRefusedError("the model does not hand the keywords of its call on to its recurrences")
    return context


def _refuse(*given: object) -> None:
    if any(value is not None for value in given):
        raise ModelRefusedError("a recurrence is given a state or a gate that is not supported")
