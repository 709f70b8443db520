"""Runs a transformers model over flat ragged batches with paged KV. It knows no requests, sampling or scheduling.

One thread owns a runner. Row r of the logits depends on its own sequence and position only, to the last bit.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.attention import CONTEXT_KEYWORD, ProbeContext
from foretoken.engine.batch import Batch, Segment, build_batch
from foretoken.engine.config import EngineConfig
from foretoken.engine.errors import ModelRefusedError
from foretoken.engine.kv_pool import KvPool, LayerShape, PagedContext
from foretoken.engine.loading import ModelInfo, Progress, load_model
from foretoken.engine.page_table import PageTable
from foretoken.engine.row_linear import use_block_linears
from foretoken.engine.self_check import check_against_eager, eager_logits, find_row_dependence, sample_sequences
from foretoken.engine.step_costs import StepCost, measure_step_costs
from foretoken.kernels.rows import PagedRows

_LOG = logging.getLogger(__name__)

_ROW_MULTIPLE = 4
"""Float32 matrix products are equal per row only for row counts of one multiple; 4 is what was tried."""


class ModelRunner:
    """A loaded model, its KV pool and its page table. Use `load`."""

    def __init__(self, model: Any, info: ModelInfo, pool: KvPool, page_table: PageTable, max_batch_rows: int) -> None:
        self.info = info
        self.page_table = page_table
        self.max_batch_rows = max_batch_rows
        self._model = model
        self._pool = pool
        self._device = model.device
        # The pool's last page belongs to nobody: padding rows write there.
        self._scratch_page = page_table.num_pages

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> "ModelRunner":
        """Load, refuse or accept, check and warm up a model.

        Args:
            progress: called with what is being done and the fraction done.

        Raises:
            ModelRefusedError: the model cannot be served exactly, with the reason.
        """
        report = progress or (lambda stage, fraction: None)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model, info = load_model(config, report)
        shapes = _probe(model)
        num_pages = _num_pages(config, info, shapes, model.dtype)
        pool = KvPool(shapes, num_pages + 1, config.page_size, model.dtype, model.device)
        runner = cls(model, info, pool, PageTable(num_pages, config.page_size), config.max_batch_rows)
        sequences = sample_sequences(info.vocab_size, info.max_context)
        expected = eager_logits(model, sequences) if config.self_check else []
        if model.dtype != torch.bfloat16:
            use_block_linears(model)
        if config.self_check:
            report("checking against the model's own forward", 0.9)
            check_against_eager(runner, sequences, expected)
            if reason := find_row_dependence(runner, sequences):
                raise ModelRefusedError(f"rows are not independent: {reason}")
        report("ready", 1.0)
        _LOG.info("model loaded: %s, %s, %d KV pages", info.model_id, info.dtype, num_pages)
        return runner

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Write the KV of the segments' tokens and return logits [sum(num_logits), V] in the model's dtype.

        Raises:
            ValueError: see `build_batch`; or a token id is outside the vocabulary, a position beyond max_context.
        """
        batch = build_batch(segments, self.page_table.page_size, self.max_batch_rows)
        self._check_range(batch)
        token_ids, positions, rows, logit_rows = self._tensors(batch)
        output = self._model(
            input_ids=token_ids,
            position_ids=positions,
            logits_to_keep=logit_rows,
            use_cache=False,
            **{CONTEXT_KEYWORD: PagedContext(self._pool, rows)},
        )
        logits: Tensor = output.logits[0, : len(batch.logit_rows)]
        return logits

    def measure_step_costs(
        self, rows: Sequence[int] = (1, 2, 4, 6, 8, 16, 32), contexts: Sequence[int] = (512,)
    ) -> list[StepCost]:
        """Median duration of a forward for each number of rows and context length; leaves the page table as it was."""
        return measure_step_costs(self, rows, contexts)

    def _check_range(self, batch: Batch) -> None:
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self.info.vocab_size:
            raise ValueError(f"segments: a token id is outside [0, {self.info.vocab_size})")
        if batch.positions.max() >= self.info.max_context:
            raise ValueError(f"segments: position {batch.positions.max()} is not below {self.info.max_context}")

    def _tensors(self, batch: Batch) -> tuple[Tensor, Tensor, PagedRows, Tensor]:
        """Tensors of the batch, padded to a multiple of rows; padding rows are token 0 at position 0 of no sequence."""
        num_padding = -batch.num_rows % _ROW_MULTIPLE
        num_segments = len(batch.page_starts) - 1
        token_ids = batch.token_ids.tolist() + [0] * num_padding
        positions = batch.positions.tolist() + [0] * num_padding
        kept = batch.logit_rows.tolist()
        kept += [0] * (-len(kept) % _ROW_MULTIPLE or (0 if kept else _ROW_MULTIPLE))

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        rows = PagedRows(
            positions=int32(positions),
            row_segments=int32(batch.row_segments.tolist() + [num_segments] * num_padding),
            page_starts=int32(batch.page_starts.tolist() + [len(batch.page_ids) + 1]),
            page_ids=int32(batch.page_ids.tolist() + [self._scratch_page]),
        )
        return (
            torch.tensor([token_ids], device=self._device),
            torch.tensor([positions], device=self._device),
            rows,
            torch.tensor(kept, device=self._device),
        )


@torch.inference_mode()
def _probe(model: Any) -> dict[int, LayerShape]:
    """Shapes of each layer's keys and values, from one forward of two tokens."""
    context = ProbeContext()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    model(input_ids=ids, position_ids=positions, use_cache=False, **{CONTEXT_KEYWORD: context})
    if not context.shapes:
        raise ModelRefusedError(f"{type(model).__name__} has no layer that uses transformers' attention interface")
    return {layer: LayerShape(*shape) for layer, shape in context.shapes.items()}


def _num_pages(config: EngineConfig, info: ModelInfo, shapes: dict[int, LayerShape], dtype: torch.dtype) -> int:
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = sum(shape.page_bytes(config.page_size, dtype.itemsize) for shape in shapes.values())
    return max(config.kv_memory_bytes // page_bytes, -(-info.max_context // config.page_size))
