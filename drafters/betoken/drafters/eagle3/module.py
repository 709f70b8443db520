"""The draft layers of the EAGLE family as torch modules: one definition for training and for serving.

Parameter names follow SafeAILab's checkpoints. The caller provides attention: see `Attend`. Knows no
pages, no sequences and no device.
Source: Li et al., EAGLE-3, arXiv:2503.01840; EAGLE, arXiv:2401.15077; written from the papers and the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from betoken.drafters.eagle3.shape import EagleShape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [..., Hq, D], key [..., H, D], value [..., H, D], all rotated -> [..., Hq, D]; scores are scaled by D^-0.5."""


class DraftLayer(Protocol):
    """The common interface of both generations. A row pairs the target's state of a position with the *next* position's
    token."""

    shape: EagleShape
    lm_head: nn.Linear | None
    """Scores of the draft's own ids; None if the target's head is used."""
    d2t: Tensor
    """[Vd] int64: draft id i is the target's id i + d2t[i]."""

    def fuse(self, states: Tensor) -> Tensor:
        """Target states [..., S * Ht], low layers first -> [..., H], input of a row with known states."""
        ...

    def run(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass of the layer.

        Args:
            embedded: [..., H] embeddings of the rows' tokens.
            hidden: [..., H], fused states, or what an earlier pass fed back.
            positions: [...] int64; only their differences matter.
            kept: rows [L], along the dimension before the last, whose outcome is wanted; None = all.
        Returns:
            [..., H] what the head reads; [..., H] what is fed back as `hidden` of the rows that follow.
        """
        ...


class RmsNorm(nn.Module):
    """x / rms(x) * weight, in float32 before the weight, as Llama's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        normed: Tensor = self.weight * wide.to(x.dtype)
        return normed


class Rotary(nn.Module):
    """Cosines and sines of positions."""

    inv_freq: Tensor

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        made = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=shape.num_heads * shape.head_dim,
                num_attention_heads=shape.num_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_context,
                rope_parameters=dict(shape.rope),
            )
        )
        self.register_buffer("inv_freq", made.inv_freq.float(), persistent=False)
        self._scaling = float(made.attention_scaling)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[...] -> cosines and sines [..., 1, D]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)[..., None, :]
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape, input_size: int) -> None:
        super().__init__()
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        width, bias = shape.num_heads * shape.head_dim, shape.has_attention_bias
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps) if shape.has_qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps) if shape.has_qk_norm else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, kept: Tensor | None) -> Tensor:
        num_heads, num_kv_heads, head_dim = self._sizes
        query = self.q_proj(x).unflatten(-1, (num_heads, head_dim))
        key = self.k_proj(x).unflatten(-1, (num_kv_heads, head_dim))
        value = self.v_proj(x).unflatten(-1, (num_kv_heads, head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = attend(_rotate(query, *angles), _rotate(key, *angles), value).flatten(-2)
        out: Tensor = self.o_proj(_rows(mixed, kept))
        return out


class _Mlp(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _MidLayer(nn.Module):
    """EAGLE-3's decoder layer: attention reads embedding and state side by side."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self._norm_before_residual = shape.norm_before_residual
        self.self_attn = _Attention(shape, 2 * shape.hidden_size)
        self.mlp = _Mlp(shape)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, kept: Tensor | None
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        x = _rows(residual, kept) + self.self_attn(x, angles, attend, kept)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _PlainLayer(nn.Module):
    """Llama's decoder layer; EAGLE-1's is without its first norm."""

    def __init__(self, shape: EagleShape, has_input_norm: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps) if has_input_norm else None
        self.self_attn = _Attention(shape, shape.hidden_size)
        self.mlp = _Mlp(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, kept: Tensor | None) -> Tensor:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = _rows(x, kept) + self.self_attn(normed, angles, attend, kept)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Layer(nn.Module):
    """EAGLE-3, and 3.1 by its flags; see `DraftLayer`."""

    d2t: Tensor
    t2d: Tensor
    """[V] bool: whether the draft knows a target's id."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        eps, states_size = shape.rms_norm_eps, shape.num_states * shape.target_hidden_size
        self.input_norm = RmsNorm(states_size, eps) if shape.norm_before_fc else None
        norms = [RmsNorm(shape.target_hidden_size, eps) for _ in range(shape.num_states if shape.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.fc = nn.Linear(states_size, shape.hidden_size, bias=False)
        self.midlayer = _MidLayer(shape)
        self.norm = RmsNorm(shape.hidden_size, eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < shape.draft_vocab_size)

    def fuse(self, states: Tensor) -> Tensor:
        """See `DraftLayer`."""
        if self.fc_norm is not None:
            parts = torch.split(states, self.shape.target_hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        fused: Tensor = self.fc(states)
        return fused

    def run(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `DraftLayer`."""
        angles = self.rotary(positions, hidden.dtype)
        out = self.midlayer(embedded.to(hidden.dtype), hidden, angles, attend, kept)
        normed = self.norm(out)
        return normed, normed if self.shape.norm_output else out

    def get_output_embeddings(self) -> nn.Module:
        """The layer that gives scores."""
        return self.lm_head


class ParallelEagleLayers(Eagle3Layer):
    """P-EAGLE: EAGLE-3's layer, further layers, and a learned input for positions whose states are not known."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.num_states * shape.target_hidden_size))
        others = {str(layer): _PlainLayer(shape, has_input_norm=True) for layer in range(1, shape.num_layers)}
        self.layers = nn.ModuleDict(others)

    def run_layers(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attends: Sequence[Attend], kept: Tensor
    ) -> Tensor:
        """One pass, as `run`, with the attention of each layer. Returns [..., H], which the head reads."""
        angles = self.rotary(positions, hidden.dtype)
        last = len(attends) - 1
        x = self.midlayer(embedded.to(hidden.dtype), hidden, angles, attends[0], None if last else kept)
        for layer in range(1, last + 1):
            x = self.layers[str(layer)](x, angles, attends[layer], kept if layer == last else None)
        normed: Tensor = self.norm(x)
        return normed


class Eagle1Layer(nn.Module):
    """EAGLE-1 and EAGLE-2, which has the same weights; see `DraftLayer`. The target's head reads its output."""

    lm_head = None
    d2t: Tensor

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList([_PlainLayer(shape)])
        self.rotary = Rotary(shape)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64), persistent=False)

    def fuse(self, states: Tensor) -> Tensor:
        """See `DraftLayer`: the one state as it is."""
        return states

    def run(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `DraftLayer`."""
        x = self.fc(torch.cat((embedded.to(hidden.dtype), hidden), dim=-1))
        out = self.layers[0](x, self.rotary(positions, hidden.dtype), attend, kept)
        return out, out


def make_layer(shape: EagleShape) -> Eagle3Layer | Eagle1Layer:
    """The module of a shape."""
    if shape.version == 1:
        return Eagle1Layer(shape)
    return Eagle3Layer(shape) if shape.mask_token_id is None else ParallelEagleLayers(shape)


def _rows(x: Tensor, kept: Tensor | None) -> Tensor:
    return x if kept is None else x.index_select(-2, kept)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, D] turned by angles [..., 1, D], whose halves are alike."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
