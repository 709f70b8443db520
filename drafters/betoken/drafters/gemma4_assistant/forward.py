"""A Gemma-4 assistant over the target's paged KV, batched over sequences, on the target's device.

It knows rows, pages and tensors; no sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from betoken.drafters.gemma4_assistant.module import AssistantModel
from betoken.engine.attention import Scoring
from betoken.engine.batch import Batch
from betoken.engine.parts import ModelParts
from betoken.engine.side.forward import SideForward, TargetKeys


class AssistantForward:
    """Changes the loaded model in place."""

    def __init__(self, model: AssistantModel, parts: ModelParts, target_layers: Mapping[str, int]) -> None:
        """Args:
        parts: the target's, whose KV, embeddings, type, device and kind of products it uses.
        target_layers: the layer of the target that layers of each kind of attention read.
        """
        self._model, self._parts = model, parts
        self._layers = [target_layers[kind] for kind in model.shape.layer_types]
        self._forward = SideForward(self._run, model, {}, parts, num_pages=1, page_size=1)
        self.vocab_size: int = model.shape.text.vocab_size

    @property
    def target_ids(self) -> Tensor:
        """[V] int64: all ids of the target."""
        return torch.arange(self.vocab_size, device=self._parts.device)

    def fuse(self, features: Tensor) -> Tensor:
        """Features [R, 1, Ht] of the target -> [R, Ht]."""
        return features.flatten(1)

    def __call__(self, batch: Batch, hidden: Tensor, target: Sequence[TargetKeys] = ()) -> tuple[Tensor, Tensor]:
        """Run one row a sequence: its token, its `hidden` [R, Ht], and its keys in the target, the token's excluded.

        Returns:
            Scores [R, V] float32 of the next tokens, and what stands for the target's state there [R, Ht].
        """
        positions = torch.tensor([keys.length for keys in target], device=self._parts.device)
        states, fed_back = self._forward(batch, hidden, positions, target=target)
        return self._scores(states), fed_back

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `AttentionContext`. The window counts keys before the row, whose own key is not there."""
        window = scoring.window + 1 if scoring.window else 0
        return self._forward.attend_target(self._layers[layer], query, scoring._replace(window=window))

    @torch.inference_mode()
    def _scores(self, states: Tensor) -> Tensor:
        """[L, H] -> [L, V] float32; -inf for ids that are not scored."""
        head = self._model.lm_head
        with self._parts.rows_alone():
            if head is not None:
                scores: Tensor = head(states).float()
                return scores
            ids, found = self._model.likely(states)
        return found.new_full((len(states), self.vocab_size), -torch.inf).scatter_(1, ids, found)

    def _run(
        self, hidden: Tensor, positions: Tensor, token_ids: Tensor, places: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """hidden [R, Ht], positions [R], token ids [R], rows [L] -> [L, H], [L, Ht]. `places` is not used."""
        inputs = torch.cat((self._parts.embed(token_ids), hidden), dim=-1)
        states = self._model.run(inputs, positions, self).index_select(0, rows)
        return states, self._model.post_projection(states)
