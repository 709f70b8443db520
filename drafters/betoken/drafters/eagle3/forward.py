"""EAGLE-3's draft layer over its own paged KV cache, batched over sequences, on the target's device.

It knows rows, pages and tensors; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from betoken.drafters.eagle3.checkpoint import LoadedLayer
from betoken.drafters.eagle3.module import ParallelEagleLayers
from betoken.drafters.side.weights import kv_shape
from betoken.engine.attention import Scoring
from betoken.engine.batch import Batch
from betoken.engine.parts import ModelParts
from betoken.engine.side.forward import SideForward


class LayerForward:
    """Changes the loaded layer in place."""

    def __init__(
        self, loaded: LoadedLayer, parts: ModelParts, num_pages: int, page_size: int, cache_dir: Path | None = None
    ) -> None:
        """Args:
        parts: the target's, whose type, device and kind of products it shares.
        num_pages: pages of the cache; there is one more, which belongs to no sequence.
        cache_dir: folder of the CPU kernels.
        """
        self.shape = loaded.shape
        self._layer, self._parts = loaded.layer, parts
        self._embedding = None if loaded.embedding is None else loaded.embedding.to(parts.device, parts.dtype)
        self._norms_states = self.shape.fc_norm or self.shape.norm_before_fc
        shapes = dict.fromkeys(range(self.shape.num_layers), kv_shape(self.shape))
        self._forward = SideForward(self._run, loaded.layer, shapes, parts, num_pages, page_size, cache_dir)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each of the draft's."""
        return torch.arange(len(self._layer.d2t), device=self._layer.d2t.device) + self._layer.d2t

    @property
    def is_compiled(self) -> bool:
        """Whether the layer runs as one compiled function."""
        return self._forward.is_compiled

    def compile(self, cache_dir: Path) -> None:
        """Run as one compiled function from now on, if the CPU kernels are available and it compiles."""
        self._forward.compile(self._make_inputs, cache_dir)

    def record(self, max_rows: int, max_length: int) -> None:
        """Record forwards of up to `max_rows` rows of sequences of up to `max_length` tokens as CUDA graphs."""
        self._forward.record(self._make_inputs, max_rows, max_length)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """Features [R, S, Ht] of the target -> [R, H], inputs of rows with known states; a separate tensor."""
        with self._parts.rows_alone() if self._norms_states else nullcontext():
            fused = self._layer.fuse(features.flatten(1))
        return fused.clone() if fused.data_ptr() == features.data_ptr() else fused

    def mask_input(self) -> Tensor:
        """[1, H], input of positions that are drafted in parallel."""
        layer = self._layer
        assert isinstance(layer, ParallelEagleLayers), "the layer drafts one token in a pass"
        return self.fuse(layer.mask_hidden.view(1, self.shape.num_states, -1))

    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Write the KV of the batch's rows, each with its `hidden` [R, H].

        Returns:
            Scores [L, Vd] float32 of the draft's ids after the rows that yield logits, and what those feed back [L, H].
        """
        scores, fed_back = self._forward(batch, hidden)
        return scores, fed_back

    def _make_inputs(self, num_rows: int) -> Sequence[Tensor]:
        return (torch.zeros(num_rows, self.shape.hidden_size, dtype=self._parts.dtype, device=self._parts.device),)

    def _run(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """hidden [R, H], token ids [R], positions [R], rows [L] -> scores [L, Vd] float32, fed back [L, H]."""
        assert hidden.shape[1] == self.shape.hidden_size, "the tracer takes the width for a number of rows"
        if self._embedding is None:
            embedded = self._parts.embed(token_ids)
        else:
            embedded = functional.embedding(token_ids, self._embedding)
        if isinstance(self._layer, ParallelEagleLayers):
            attends = [partial(self._attend, layer=layer) for layer in range(self.shape.num_layers)]
            read = fed_back = self._layer.run_layers(embedded, hidden, positions, attends, rows)
        else:
            read, fed_back = self._layer.run(embedded, hidden, positions, self._attend, rows)
        head = self._layer.lm_head
        return self._parts.head(read) if head is None else head(read).float(), fed_back

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int = 0) -> Tensor:
        return self._forward.attend(layer, query, key, value, Scoring(self.shape.head_dim**-0.5, 0, 0.0, None))
