"""A draft layer over its own paged KV cache, batched over sequences, with the engine's operators.

On a CPU it runs as one compiled function if the target does. It knows rows, pages and tensors; no sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from betoken.drafters.eagle3.checkpoint import LoadedLayer
from betoken.drafters.eagle3.shape import EagleShape
from betoken.engine.attention import AttentionContext, Scoring
from betoken.engine.batch import Batch, Segment, build_batch
from betoken.engine.compiled import EXAMPLE_LOGITS, EXAMPLE_ROWS
from betoken.engine.cpu.compiled import compile_call
from betoken.engine.cpu.forward import CpuContext
from betoken.engine.cuda.step_inputs import StepInputs
from betoken.engine.kv_pool import KvPool, LayerShape
from betoken.engine.paged_context import PagedContext
from betoken.engine.parts import ModelParts
from betoken.engine.weights.layers import replace_linears
from betoken.kernels.cpu import CPU_DTYPES, CpuCache, load_cpu_kernels

_LOG = logging.getLogger(__name__)


def kv_shape(shape: EagleShape) -> LayerShape:
    """The layer's record of a token."""
    return LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)


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
        self._scratch_page = num_pages
        self._pool = KvPool({0: kv_shape(self.shape)}, num_pages + 1, page_size, parts.dtype, parts.device)
        self._move()
        self._cache: CpuCache | None = None
        if parts.device.type == "cpu" and parts.dtype in CPU_DTYPES and (kernels := load_cpu_kernels(cache_dir)):
            self._cache = kernels.create_cache(self._pool.keys, self._pool.values)
        self._context: AttentionContext = CpuContext()
        self._call: Callable[..., tuple[Tensor, ...]] = self._eager

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each of the draft's."""
        return torch.arange(len(self._layer.d2t), device=self._layer.d2t.device) + self._layer.d2t

    def compile(self, cache_dir: Path) -> None:
        """Run as one compiled function from now on, if the CPU kernels are available and it compiles."""
        if self._cache is None:
            return
        pages = [self._scratch_page] * -(-EXAMPLE_ROWS // self._pool.page_size)
        segment = Segment(pages, 0, [0] * EXAMPLE_ROWS, EXAMPLE_LOGITS)
        example = build_batch([segment], self._pool.page_size, EXAMPLE_ROWS)
        hidden = torch.zeros(EXAMPLE_ROWS, self.shape.hidden_size, dtype=self._parts.dtype)
        try:
            self._call = compile_call(self._run, (hidden, *self._begin(example)), self._layer, cache_dir)
        except Exception as error:  # tracer and compiler raise many types; an eager layer is always correct
            _LOG.warning("the draft layer runs eagerly, which is slower: %s", error)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """Features [R, S, Ht] of the target -> [R, H], inputs of rows with known states; a separate tensor."""
        with self._parts.rows_alone() if self._norms_states else nullcontext():
            fused = self._layer.fuse(features.flatten(1))
        return fused.clone() if fused.data_ptr() == features.data_ptr() else fused

    @torch.inference_mode()
    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Write the KV of the batch's rows, each with its `hidden` [R, H].

        Returns:
            Scores [L, Vd] float32 of the draft's ids after the rows that yield logits, and what those feed back [L, H].
        """
        scores, fed_back = self._call(hidden, *self._begin(batch))
        num_kept = len(batch.logit_rows)
        return scores[:num_kept], fed_back[:num_kept]

    def _begin(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Begin the batch's step on this thread; token ids [R], positions [R], rows that yield logits [L]."""
        if self._cache is not None:
            self._cache.begin_step(batch.layout, batch.num_rows, batch.num_segments, batch.has_trees)
            columns = (batch.token_ids, batch.positions, batch.logit_rows or [0])
            return cast(
                tuple[Tensor, Tensor, Tensor], tuple(torch.from_numpy(np.array(column, np.int64)) for column in columns)
            )
        inputs = StepInputs.for_batch(batch, self._scratch_page, self._parts.device)
        self._context = PagedContext(self._pool, inputs.make_rows(max(batch.positions) + 1))
        token_ids, positions, rows = inputs.model_arguments()
        return token_ids[0], positions[0], rows

    def _eager(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._parts.rows_alone():
            return self._run(*tensors)

    def _run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """hidden [R, H], token ids [R], positions [R], rows [L] -> scores [L, Vd] float32, fed back [L, H]."""
        hidden, token_ids, positions, rows = tensors
        assert hidden.shape[1] == self.shape.hidden_size, "the tracer takes the width for a number of rows"
        if self._embedding is None:
            embedded = self._parts.embed(token_ids)
        else:
            embedded = functional.embedding(token_ids, self._embedding)
        read, fed_back = self._layer.run(embedded, hidden, positions, self._attend, rows)
        head = self._layer.lm_head
        return self._parts.head(read) if head is None else head(read).float(), fed_back

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scoring = Scoring(self.shape.head_dim**-0.5, 0, 0.0, None)
        return self._context.attend(0, query, key.contiguous(), value.contiguous(), scoring)

    def _move(self) -> None:
        """To the target's device and kind of products; angles and ids keep their types."""
        layer, parts = self._layer.to(self._parts.device), self._parts
        replace_linears(layer, parts.linear)
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(parts.dtype)
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                raise AssertionError("a linear layer was left as it was")
