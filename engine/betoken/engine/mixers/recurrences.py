"""Layers with a recurrent state: transformers' own code, with our functions in the place of its kernels.

The families of Gated DeltaNet and of Mamba-2 call module-level functions for their convolution and their recurrence.
Each layer's forward is bound to our functions instead. transformers itself is unchanged.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN
from transformers.utils.generic import ModelOutput

from betoken.engine.errors import ModelRefusedError
from betoken.engine.mixers.handed import Handed
from betoken.engine.mixers.rebinding import own_forward, rebind
from betoken.kernels.linear_recurrence.rule import Recurrence

_CONVOLUTION = "causal_conv1d_fn"


class RecurrentLayer:
    """The functions of one layer."""

    def __init__(self, layer: int, handed: Handed) -> None:
        self._layer = layer
        self._handed = handed

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> Tensor:
        """transformers' `causal_conv1d_fn`: [1, C, R] -> [1, C, R]."""
        x = hidden_states[0].T
        y = self._handed.context.convolve_states(self._layer, x, weight.T.contiguous().to(x.dtype), bias)
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
        out = self._handed.context.recur(self._layer, query[0], key[0], value[0], gates, rule)
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
        out = self._handed.context.recur(self._layer, C[0], B[0], x, gates, rule)
        if D is not None:
            out = out + D.float()[:, None] * x.float()
        return out[None]


BindRecurrence = Callable[[RecurrentLayer], Callable[..., Any]]
"""One layer's functions -> the function that computes a recurrence of transformers."""


def gated_delta_rule(layer: RecurrentLayer) -> Callable[..., Any]:
    """Replaces `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""
    return layer.gated_delta_rule


def mamba2(layer: RecurrentLayer) -> Callable[..., Any]:
    """Replaces `mamba2_chunk_scan`."""
    return layer.mamba2


def bind_recurrences(model: nn.Module, handed: Handed, recurrences: Mapping[str, BindRecurrence]) -> None:
    """Bind every layer with a recurrence to our functions; the model then runs with a context only.

    Raises:
        ModelRefusedError: a layer's code is not as it was when this was written.
    """
    for module in model.modules():
        forward = own_forward(module)
        if not isinstance(forward, FunctionType) or not type(module).__module__.startswith("transformers."):
            continue
        called = {name for name in forward.__code__.co_names if name in recurrences and name in forward.__globals__}
        if called:
            _bind(module, handed, {name: recurrences[name] for name in called})


def _bind(module: nn.Module, handed: Handed, recurrences: Mapping[str, BindRecurrence]) -> None:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ModelRefusedError(f"{type(module).__name__} has no layer index")
    layer = RecurrentLayer(int(index), handed)
    rebind(module, {_CONVOLUTION: layer.convolve, **{name: bind(layer) for name, bind in recurrences.items()}})


def keep_head_weight(model: Any) -> None:
    """Give Mamba's models, the first's and the second's, a forward that leaves the weight of their head alone."""

    def forward(
        input_ids: Tensor, logits_to_keep: int | Tensor = 0, output_hidden_states: Any = None, **keywords: Any
    ) -> ModelOutput:
        wanted = {"output_hidden_states": bool(output_hidden_states), "return_dict": True, "use_cache": False}
        output = model.backbone(input_ids, **wanted)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = model.lm_head(output.last_hidden_state[:, kept].to(model.dtype))
        return ModelOutput(  # type: ignore[no-untyped-call]
            logits=logits.float(), hidden_states=output.hidden_states
        )

    model.forward = forward


def _refuse(*given: object) -> None:
    if any(value is not None for value in given):
        raise ModelRefusedError("a recurrence is given a state or a gate that is not supported")
