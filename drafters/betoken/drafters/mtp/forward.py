"""An MTP layer over its own paged KV cache, batched over sequences, on the target's device.

It knows rows, pages and tensors; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from betoken.drafters.mtp.checkpoint import call_layer, rotary_of
from betoken.engine.batch import Batch
from betoken.engine.kv_pool import LayerShape
from betoken.engine.parts import ModelParts
from betoken.engine.side.forward import SideForward


class MtpForward:
    """Changes the loaded modules in place. The target's embeddings, head and rotations are shared."""

    def __init__(
        self,
        model: MtpModel,
        shape: LayerShape,
        parts: ModelParts,
        vocab_size: int,
        num_pages: int,
        page_size: int,
        cache_dir: Path | None = None,
        has_head: bool = True,
    ) -> None:
        """Args:
        shape: the layer's record of a token.
        parts: the target's.
        vocab_size: ids of the target.
        num_pages: pages of the cache; there is one more, which belongs to no sequence.
        cache_dir: folder of the CPU kernels.
        has_head: whether a pass gives logits, too; otherwise see `scores`.
        """
        self._layer: Any = model.layers[0]
        self._has_head = has_head
        self._parts, self._vocab_size = parts, vocab_size
        self._rotary = rotary_of(model, parts.rotary)
        parts.use_experts(model)
        layers = nn.ModuleList([self._layer])
        self._forward = SideForward(self._run, layers, {0: shape}, parts, num_pages, page_size, cache_dir)

    @property
    def target_ids(self) -> Tensor:
        """[V] int64: all ids of the target."""
        return torch.arange(self._vocab_size, device=self._parts.device)

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

    def fuse(self, features: Tensor) -> Tensor:
        """Features [R, 1, H] of the target -> [R, H], inputs of rows with known states; a separate tensor."""
        return features.flatten(1).clone()

    @torch.inference_mode()
    def scores(self, output: Tensor) -> Tensor:
        """The layer's output [L, H] -> logits [L, V] float32 of the tokens after these rows."""
        with self._parts.rows_alone():
            return self._parts.head(output)

    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Write the KV of the batch's rows, each with its `hidden` [R, H].

        Returns:
            Logits [L, V] float32 of the tokens after the rows that yield logits, with a head, and the layer's output
            [L, H].
        """
        return self._forward(batch, hidden)

    def _make_inputs(self, num_rows: int) -> Sequence[Tensor]:
        return (torch.zeros(num_rows, self._parts.hidden_size, dtype=self._parts.dtype, device=self._parts.device),)

    def _run(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """hidden [R, H], token ids [R], positions [R], rows [L] -> logits [L, V] float32 with a head, output [L, H]."""
        assert hidden.shape[1] == self._parts.hidden_size, "the tracer takes the width for a number of rows"
        embedded = self._parts.embed(token_ids)[None]
        output = call_layer(self._layer, self._rotary, embedded, hidden[None], positions[None], self._forward)
        kept = output[0].index_select(0, rows)
        return (self._parts.head(kept), kept) if self._has_head else (kept,)
