"""The layers of a block drafter as a torch module; its parameters have the names of z-lab's and DeepSpec's files.

A row is either context, whose keys and values come from the target's states alone, or a token of a block, which runs
through the layers. The caller provides attention. Knows no pages, no sequences and no device.
Source: Chen et al., DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147; written from the papers and the layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from betoken.drafters.dflash.convolution import GroupedConvolution
from betoken.drafters.dflash.heads import CandidateSelector, ConfidenceHead, MarkovHead
from betoken.drafters.dflash.shape import BlockShape
from betoken.engine.errors import ModelRefusedError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""layer, query [R, Hq, D], key [R, H, D], value [R, H, D], all rotated -> [R, Hq, D]; scores are scaled by D^-0.5."""


def make_rotary(shape: BlockShape) -> Qwen3RotaryEmbedding:
    """Cosines and sines of positions.

    Raises:
        ModelRefusedError: transformers refuses the parameters.
    """
    try:
        return Qwen3RotaryEmbedding(
            Qwen3Config(
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_context,
                rope_parameters=dict(shape.rope),
            )
        )
    except Exception as error:  # of many types, some of them transformers' own
        raise ModelRefusedError(f"rope_parameters: {' '.join(str(error).split())}") from error


class BlockModel(nn.Module):
    """All weights except embeddings; `rotary` is set by `make_rotary`."""

    rotary: Qwen3RotaryEmbedding
    d2t: Tensor
    """[Vd] int64: draft id i is the target's id i + d2t[i]."""

    def __init__(
        self, shape: BlockShape, vocab_size: int, has_head: bool = False, has_confidence_bias: bool = True
    ) -> None:
        """`vocab_size`: ids of the target. `has_head`: whether it has its own output layer, for its own ids."""
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        num_states = len(shape.state_layers or range(shape.num_layers))
        self.fc = nn.Linear(num_states * shape.target_hidden_size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([_Layer(shape, layer) for layer in range(shape.num_layers)])
        self.norm = Qwen3RMSNorm(size, shape.rms_norm_eps)
        num_ids = shape.draft_vocab_size or vocab_size
        self.lm_head = nn.Linear(size, num_ids, bias=False) if has_head else None
        self.markov_head = MarkovHead(shape, vocab_size, num_ids) if shape.markov_rank else None
        self.confidence_head = ConfidenceHead(shape, has_confidence_bias) if shape.has_confidence else None
        self.candidate_selector = CandidateSelector(shape, vocab_size) if shape.selector_rank else None

    def fuse(self, states: Tensor) -> Tensor:
        """Target states [..., S * Ht] in the drafter's order -> context [..., H]."""
        context: Tensor = self.hidden_norm(self.fc(states))
        return context

    def run(
        self, context: Tensor, embedded: Tensor, places: Tensor, positions: Tensor, attend: Attend, rows: Tensor
    ) -> Tensor:
        """One pass.

        Args:
            context: [R, H], read at context rows.
            embedded: [L, H] embeddings of the tokens of blocks.
            places: [R, 2] int64: for each token of a block its index among these [L], and within its block; -1 for
                context.
            positions: [R] int64.
            rows: [L] int64 rows of the tokens of blocks.
        Returns:
            [L, H], which the output layer reads.
        """
        cos, sin = self.rotary(context, positions[None])
        angles = cos[0][:, None], sin[0][:, None]
        offsets = places[:, 1].index_select(0, rows)
        x = embedded.to(context.dtype)
        for layer in self.layers:
            x = layer(x, context, places[:, 0], offsets, angles, attend, rows)
        normed: Tensor = self.norm(x)
        return normed


class _Layer(nn.Module):
    """Qwen3's decoder layer, whose attention reads context, too; in DFlash 2 with convolutions around both parts."""

    def __init__(self, shape: BlockShape, layer: int) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, layer)
        config = Qwen3Config(hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size)
        self.mlp = Qwen3MLP(config)  # type: ignore[no-untyped-call]
        self.input_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        has_convolutions = shape.conv_kernel_size > 0
        self.attention_conv = GroupedConvolution(shape) if has_convolutions else None
        self.mlp_conv = GroupedConvolution(shape) if has_convolutions else None

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        places: Tensor,
        offsets: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        rows: Tensor,
    ) -> Tensor:
        def mix(normed: Tensor) -> Tensor:
            own = normed.index_select(0, places.clamp_min(0))
            mixed: Tensor = self.self_attn(torch.where(places[:, None] >= 0, own, context), angles, attend, rows)
            return mixed

        x = x + _between(self.attention_conv, self.input_layernorm(x), offsets, mix)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), offsets, self.mlp)


class _Attention(nn.Module):
    def __init__(self, shape: BlockShape, layer: int) -> None:
        super().__init__()
        self._layer, self._head_dim = layer, shape.head_dim
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        bias = shape.has_attention_bias
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, rows: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self._head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(self.q_norm(query), *angles), _rotate(self.k_norm(key), *angles)
        out: Tensor = self.o_proj(attend(self._layer, query, key, value).flatten(-2).index_select(0, rows))
        return out


def _between(
    conv: GroupedConvolution | None, x: Tensor, offsets: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """The sublayer with a convolution of its input before it and of its output after it, if there is any."""
    if conv is None:
        return sublayer(x)
    taps = conv.taps(x)
    return conv.apply_side(1, sublayer(conv.apply_side(0, x, taps, offsets)), taps, offsets)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, D] turned by angles [R, 1, D], whose halves are alike."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
