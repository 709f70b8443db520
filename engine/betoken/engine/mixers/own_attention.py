"""Families whose attention is code of their own: their layers, with our attention in its place.

GPT-J, CodeGen, GPT-Neo, Falcon, BLOOM and MPT come from before transformers' attention interface; Llama 4 cuts
positions into spans by its mask alone. The layers find the batch through the current context. Nothing of transformers
is changed.
"""

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.attention import ATTENTION_NAME, Scoring, current_context
from betoken.engine.errors import ModelRefusedError
from betoken.engine.mixers.llama4_mixture import Llama4Mixture
from betoken.engine.mixers.repairs import REPAIRS

LOADED_EAGERLY = frozenset({"gptj", "codegen", "gpt_neo", "falcon", "bloom", "mpt"})
"""Model types whose layers take the names of transformers' own attention alone."""
FAMILIES = LOADED_EAGERLY | {"llama4_text"}
"""Model types whose attention is replaced here; it states windows and spans itself."""


def check_own_attention(config: Any) -> None:
    """Refuse settings of these families that ours does not compute.

    Args:
        config: the text configuration of a transformers model.

    Raises:
        ModelRefusedError: with the field and its value.
    """
    model_type = getattr(config, "model_type", "")
    if model_type == "falcon" and config.alibi:
        raise ModelRefusedError("falcon: alibi = true: its biases are rounded to bfloat16 by absolute position")
    if model_type == "bloom" and config.pretraining_tp > 1 and config.slow_but_exact:
        raise ModelRefusedError("bloom: slow_but_exact = true: its products are cut into pieces")


def bind_own_attention(model: Any) -> None:
    """Give the layers of these families our attention; the model then runs with a context only."""
    for module in list(model.modules()):
        bind = _BINDINGS.get(type(module).__name__)
        if bind is not None and type(module).__module__.startswith("transformers."):
            bind(module)
    if model.config.model_type in LOADED_EAGERLY:
        model.config._attn_implementation_internal = ATTENTION_NAME  # so that no mask is made
    if model.config.model_type == "llama4_text":
        model._can_set_experts_implementation = lambda: True
        model.set_experts_implementation("batched_mm")


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Query [1, R, Hq, D], key [1, R, H, D], value [1, R, H, E] -> [1, R, Hq * E]."""
    out = current_context().attend(layer, query[0], key[0], value[0], scoring)
    return out.flatten(1)[None]


def _gptj(module: Any) -> None:
    """Replace the product of GPT-J's attention, and of CodeGen's, whose rotation may leave float32."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        rows = [tensor.transpose(1, 2).to(value.dtype) for tensor in (query, key, value)]
        scoring = Scoring(1 / module.scale_attn, 0, 0.0, None)
        out = _attend(module.layer_idx, rows[0], rows[1], rows[2], scoring)
        return out.unflatten(-1, value.shape[1::2]).transpose(1, 2), None  # type: ignore[no-untyped-call]

    module._attn = attend


def _gpt_neo(module: Any) -> None:
    """Replace the product of GPT-Neo's attention, whose scores are not scaled; every other layer has a window."""
    window = module.config.window_size if module.attention_type == "local" else 0
    module.bias = None  # the mask: one number for each pair of positions

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        out = _attend(module.layer_id, rows[0], rows[1], rows[2], Scoring(1.0, window, 0.0, None))
        return out.unflatten(-1, value.shape[1::2]).transpose(1, 2), None  # type: ignore[no-untyped-call]

    module._attn = attend


def _falcon(module: Any) -> None:
    """Replace Falcon's attention with rotary positions. Its heads share keys by groups, which it copies for each."""
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    num_groups = module.num_kv_heads
    is_joined_by_group = module.new_decoder_architecture or module.multi_query

    def forward(
        hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **keywords: Any
    ) -> tuple[Tensor, None]:
        fused = module.query_key_value(hidden_states)
        if is_joined_by_group:
            parts = fused.unflatten(-1, (num_groups, module.num_heads // num_groups + 2, module.head_dim))
            query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        else:
            query, key, value = fused.unflatten(-1, (module.num_heads, 3, module.head_dim)).unbind(3)
        query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        scoring = Scoring(module.head_dim**-0.5, 0, 0.0, None)
        out = _attend(module.layer_idx, query.transpose(1, 2), key.transpose(1, 2), value, scoring)
        return module.dense(out), None

    module.forward = forward


def _falcon_linears(module: Any) -> None:
    """Make linear layers of Falcon's own kind stock ones, which ours replace."""
    for name, child in list(module.named_children()):
        if type(child).__name__ == "FalconLinear":
            linear = nn.Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
            linear.weight, linear.bias = child.weight, child.bias
            setattr(module, name, linear)


def _falcon_attention(module: Any) -> None:
    _falcon_linears(module)
    _falcon(module)


def _bloom(module: Any) -> None:
    """Replace BLOOM's attention, whose scores fall with distance."""
    slopes: Tensor = sys.modules[type(module).__module__]._get_alibi_slopes(
        module.num_heads, module.dense.weight.device
    )
    scoring = Scoring(module.inv_norm_factor, 0, 0.0, None, 0, slopes.float().flatten())

    def forward(hidden_states: Tensor, residual: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        query, key, value = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, -1)).unbind(3)
        return residual + module.dense(_attend(module.layer_idx, query, key, value, scoring)), None

    module.forward = forward


def _bloom_gelu(module: Any) -> None:
    """Leave out the gradient of BLOOM's activation, which no tracer passes."""
    module.forward = sys.modules[type(module).__module__].bloom_gelu_forward


def _mpt(module: Any) -> None:
    """Replace MPT's attention, whose scores fall with distance."""
    make = sys.modules[type(module).__module__].build_mpt_alibi_tensor
    slopes = -make(module.n_heads, 2, device=module.out_proj.weight.device).float()[:, 0, 0]
    scoring = Scoring(float(module.softmax_scale), 0, 0.0, None, 0, slopes.contiguous())

    def forward(hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(2)
        return module.out_proj(_attend(module.layer_idx, query, key, value, scoring)), None

    module.forward = forward


def _mpt_model(module: Any) -> None:
    """Have MPT make neither its mask nor its biases, of which there would be one for each pair of positions."""
    forward = inspect.unwrap(type(module).forward)
    no_mask = {"create_causal_mask": lambda **keywords: torch.zeros(0)}
    bound = FunctionType(
        forward.__code__,
        {**forward.__globals__, **no_mask},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(bound, module)
    module.build_mpt_alibi_tensor = lambda *arguments, **keywords: None


def _llama4(module: Any) -> None:
    """Replace Llama 4's attention: spans of positions, layers without rotation, queries that grow with the position."""
    config, layer = module.config, module.layer_idx
    span = config.attention_chunk_size if config.layer_types[layer] == "chunked_attention" else 0
    scoring = Scoring(module.scaling, 0, 0.0, None, span or 0)

    def forward(
        hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **keywords: Any
    ) -> tuple[Tensor, None]:
        angles, position_ids = position_embeddings
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, module.head_dim))
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if module.use_rope:
            query, key = (_rotate_pairs(rows, angles) for rows in (query, key))
        if hasattr(module, "qk_norm"):
            query, key = module.qk_norm(query), module.qk_norm(key)
        if module.attn_temperature_tuning and not module.use_rope:
            steps = torch.floor((position_ids.float() + 1.0) / module.floor_scale)
            growth = torch.log1p(steps) * module.attn_scale + 1.0
            query = (query * growth[..., None, None]).to(query.dtype)
        return module.o_proj(_attend(layer, query, key, value, scoring)), None

    module.forward = forward


def _llama4_angles(module: Any) -> None:
    """Give cosines and sines [1, R, 2, D / 2] in the place of complex numbers, which compilers do not take, and the
    positions, which layers without rotation take."""

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * module.inv_freq.float()
        return torch.stack([angles.cos(), angles.sin()], dim=-2) * module.attention_scaling, position_ids

    module.forward = forward


def _rotate_pairs(rows: Tensor, angles: Tensor) -> Tensor:
    """[1, R, H, D], whose neighbours are pairs."""
    cos, sin = angles[:, :, None].unbind(-2)
    first, second = rows.float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).to(rows.dtype)


def _llama4_layer(module: Any) -> None:
    """Put a mixture whose experts run one by one in the place of one that runs all."""
    if module.is_moe_layer:
        module.feed_forward = Llama4Mixture(module.feed_forward, module.self_attn.config)


_BINDINGS: dict[str, Callable[[Any], None]] = {
    "GPTJAttention": _gptj,
    "CodeGenAttention": _gptj,
    "GPTNeoSelfAttention": _gpt_neo,
    "FalconAttention": _falcon_attention,
    "FalconMLP": _falcon_linears,
    "BloomAttention": _bloom,
    "BloomGelu": _bloom_gelu,
    "MptAttention": _mpt,
    "MptModel": _mpt_model,
    "Llama4TextAttention": _llama4,
    "Llama4TextRotaryEmbedding": _llama4_angles,
    "Llama4TextDecoderLayer": _llama4_layer,
    **REPAIRS,
}
"""Class of transformers -> what makes it ours."""
