"""The layers of a Gemma-4 assistant, transformers' own, around which keys come from the target.

Parameter names follow the published checkpoints, without `model.`. Knows no pages and no sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel

from betoken.drafters.gemma4_assistant.shape import AssistantShape
from betoken.engine.attention import CONTEXT_KEYWORD, register_attention

_OWN_KV = ("k_proj", "v_proj", "k_norm", "v_norm")
_SCORED_AT_ONCE = 8
"""Rows whose chosen embeddings are in memory at a time."""


class AssistantModel(nn.Module):
    """To be made on the meta device; `complete` sets what no file holds."""

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()
        register_attention()
        self.shape = shape
        text: Any = AutoModel.from_config(shape.text)  # type: ignore[no-untyped-call]
        self.layers, self.norm = text.layers, text.norm
        for layer in text.layers:
            layer.self_attn.is_kv_shared_layer = True
            for name in _OWN_KV:
                delattr(layer.self_attn, name)
        self._make_rotary = type(text.rotary_emb)
        hidden_size, target_size = shape.text.hidden_size, shape.target_hidden_size
        self.pre_projection = nn.Linear(2 * target_size, hidden_size, bias=False)
        self.post_projection = nn.Linear(hidden_size, target_size, bias=False)
        self.embed_tokens = nn.Embedding(shape.text.vocab_size, hidden_size)
        """Embeddings of the output layer; the input's are the target's."""
        self.lm_head: nn.Linear | None = None
        self.masked_embedding = nn.ModuleDict()
        if shape.num_centroids:
            self.masked_embedding["centroids"] = nn.Linear(hidden_size, shape.num_centroids, bias=False)
        self.members: Tensor
        self.register_buffer("members", None, persistent=False)

    def complete(self, token_ordering: Tensor | None) -> None:
        """Set rotary frequencies and the output layer. `token_ordering`: [V] ids by centroid; None = all are scored."""
        self.rotary = self._make_rotary(self.shape.text)
        if token_ordering is not None:
            self.members = token_ordering.view(self.shape.num_centroids, -1)
            return
        vocab_size, hidden_size = self.embed_tokens.weight.shape
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.embed_tokens.weight
        del self.embed_tokens

    def run(self, inputs: Tensor, positions: Tensor, context: Any) -> Tensor:
        """Embeddings and states [R, 2 Ht] at positions [R] -> [R, H], which the output layers read.

        `context`: attends, see `AttentionContext`; it receives no keys.
        """
        hidden = self.pre_projection(inputs)[None]
        kinds = self.shape.layer_types
        angles = {kind: self.rotary(hidden, positions[None], kind) for kind in dict.fromkeys(kinds)}
        nothing = hidden.new_empty(1, 1, 0, 1)
        keys = dict.fromkeys(kinds, (nothing, nothing))
        for layer, kind in zip(self.layers, kinds, strict=True):
            hidden = layer(
                hidden,
                shared_kv_states=keys,
                position_embeddings=angles[kind],
                attention_mask=None,
                position_ids=positions[None],
                past_key_values=None,
                **{CONTEXT_KEYWORD: context},
            )
        out: Tensor = self.norm(hidden)[0]
        return out

    def likely(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States [L, H] -> ids [L, N] of the likeliest centroids, and their scores [L, N] float32."""
        centroids: Tensor = self.masked_embedding["centroids"](states)
        _, chosen = torch.topk(centroids.float(), self.shape.top_centroids, dim=-1)
        ids = self.members[chosen].flatten(1)
        parts = zip(torch.split(states, _SCORED_AT_ONCE), torch.split(ids, _SCORED_AT_ONCE), strict=True)
        return ids, torch.cat([self._score(*part) for part in parts])

    def _score(self, states: Tensor, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.embed_tokens.weight)
        return (rows.float() * states.float()[:, None]).sum(-1)
