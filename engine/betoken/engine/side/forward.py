"""Runs a few layers over their own paged KV, given features of a target model; drafters on hidden states use it.

It shares the target's device, type and kind of products, and takes the CPU kernels, the GPU operators or the
references. Attention is causal along a chain or a tree path, mutual in a block (`Segment.num_mutual`), or reads the
target's own keys. It knows rows and pages, not sequences.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from betoken.engine.attention import AttentionContext, Scoring
from betoken.engine.batch import Batch, Segment, build_batch
from betoken.engine.compiled import EXAMPLE_LOGITS, EXAMPLE_ROWS, TensorCall
from betoken.engine.cpu.compiled import compile_call
from betoken.engine.cpu.experts import BareProducts
from betoken.engine.cpu.forward import CpuContext
from betoken.engine.cuda.buckets import bucket_sizes, length_bounds
from betoken.engine.cuda.graphs import GraphRecorder, Recorder
from betoken.engine.cuda.recorded import RecordedForwards
from betoken.engine.cuda.step_inputs import StepInputs
from betoken.engine.kv_pool import KvPool, LayerShape
from betoken.engine.paged_context import PagedContext
from betoken.engine.parts import ModelParts
from betoken.engine.staging import to_device
from betoken.engine.weights.layers import replace_linears
from betoken.kernels.attention import attention
from betoken.kernels.cpu import CPU_DTYPES, CpuCache, load_cpu_kernels
from betoken.kernels.rows import PagedRows

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetKeys:
    """The target's keys that the rows of one segment read."""

    page_ids: Sequence[int]
    """Pages of the sequence in the target's cache."""
    length: int
    """Tokens in them that are visible, at least 1."""


class SideForward:
    """Changes the layers in place: the target's device, type and linear layers."""

    def __init__(
        self,
        run: TensorCall,
        layers: nn.Module,
        shapes: Mapping[int, LayerShape],
        parts: ModelParts,
        num_pages: int,
        page_size: int,
        cache_dir: Path | None = None,
    ) -> None:
        """Args:
        run: calls the layers: inputs [R, ...], token ids [R], positions [R], rows with logits [L] -> tensors [L, ...].
            It attends by `attend` and `attend_target`.
        shapes: each layer's record of a token, by layers from 0 on; empty for layers that write no keys.
        parts: the target's.
        num_pages: pages of the cache; there is one more, which belongs to no sequence.
        cache_dir: folder of the compiled CPU kernels.
        """
        self._run, self._layers, self._parts = run, layers, parts
        self._scratch_page = num_pages
        self._pool = KvPool(dict(shapes), num_pages + 1, page_size, parts.dtype, parts.device)
        _adopt(layers, parts)
        self._cache: CpuCache | None = None
        if shapes and parts.device.type == "cpu" and parts.dtype in CPU_DTYPES:
            if kernels := load_cpu_kernels(cache_dir):
                self._cache = kernels.create_cache(self._pool.keys, self._pool.values)
        self._context: AttentionContext = CpuContext()
        has_bare = self._cache is not None and any(weight.dim() == 2 for weight in layers.parameters())
        self._bare_products = BareProducts(layers) if has_bare else None
        self._target_rows: PagedRows | None = None
        self._call: Callable[..., tuple[Tensor, ...]] = self._eager
        self._recorded: RecordedForwards | None = None
        self.is_compiled = False
        """Whether it runs as one compiled function."""

    def compile(self, make_inputs: Callable[[int], Sequence[Tensor]], cache_dir: Path) -> None:
        """Run as one compiled function from now on, if the CPU kernels run and a compiler accepts the layers.

        Layers that read the target's keys stay eager.

        Args:
            make_inputs: number of rows -> example inputs.
        """
        if self._cache is None:
            return
        pages = [self._scratch_page] * -(-EXAMPLE_ROWS // self._pool.page_size)
        segment = Segment(pages, 0, [0] * EXAMPLE_ROWS, EXAMPLE_LOGITS)
        example = build_batch([segment], self._pool.page_size, EXAMPLE_ROWS)
        inputs = (*make_inputs(EXAMPLE_ROWS), *self._begin(example))

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:  # the tracer would count the self of a method
            return self._run_layers(*tensors)

        try:
            if self._bare_products is not None:
                self._eager(*inputs)  # packs what no linear layer owns, which a tracer could not
            self._call = compile_call(call, inputs, self._layers, cache_dir)
            self.is_compiled = True
        except Exception as error:  # tracer and compiler raise many types; an eager layer is always correct
            _LOG.warning("the draft layer runs eagerly, which is slower: %s", error)

    def record(
        self,
        make_inputs: Callable[[int], Sequence[Tensor]],
        max_rows: int,
        max_length: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Record forwards of up to `max_rows` rows as CUDA graphs, if the device takes them; others stay eager, as do
        layers that read the target's keys.

        Args:
            make_inputs: number of rows -> inputs of padding rows, on the device.
            max_length: tokens of the longest sequence.
            recorder: None = of the current device.
        """

        recorded = RecordedForwards(bucket_sizes(max_rows), length_bounds(max_length))
        places = (self._scratch_page, self._pool.page_size, self._parts.device)
        try:
            recorded.record(self._run_step, *places, recorder or GraphRecorder(), make_inputs)
            self._recorded = recorded
        except RuntimeError as error:  # too little memory, or CUDA's complaint about what cannot be recorded
            _LOG.warning("the draft layer is not recorded as graphs, which is slower: %s", error)

    @torch.inference_mode()
    def __call__(self, batch: Batch, *inputs: Tensor, target: Sequence[TargetKeys] = ()) -> tuple[Tensor, ...]:
        """Write the KV of the batch's rows, each with its inputs, and return what `run` gives for rows with logits.

        Args:
            target: of each segment, if the layers read the target's keys.
        """
        self._parts.catch_up()  # before the step begins that the kernels of this thread read
        if self._recorded is not None and not target and (found := self._recorded.replay(batch, inputs)) is not None:
            return tuple(result[: len(batch.logit_rows)].clone() for result in found)
        self._target_rows = self._rows_of(batch, target) if target else None
        results = self._call(*inputs, *self._begin(batch))
        return tuple(result[: len(batch.logit_rows)] for result in results)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write `key` [R, H, D] and `value` [R, H, E] of a layer, attend `query` [R, Hq, D], return [R, Hq, E]."""
        return self._context.attend(layer, query, key.contiguous(), value.contiguous(), scoring)

    def attend_target(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend `query` [R, Hq, D] to the target's keys of its `layer`, and write none; return [R, Hq, E]."""
        pool, rows = self._parts.pool, self._target_rows
        assert pool is not None and rows is not None, "the call names no keys of the target"
        return attention(query.contiguous(), pool.keys[layer], pool.values[layer], rows, **scoring._asdict())

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

    def _run_step(self, step: StepInputs, max_length: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The layers over a step with dispatched ops."""
        self._context = PagedContext(self._pool, step.make_rows(max_length))
        token_ids, positions, rows = step.model_arguments()
        return self._eager(*inputs, token_ids[0], positions[0], rows)

    def _rows_of(self, batch: Batch, target: Sequence[TargetKeys]) -> PagedRows:
        """The batch's rows as readers of the target's cache."""
        segments = batch.parts()[1]
        lengths = np.array([keys.length for keys in target], np.int32)
        starts = np.cumsum([0, *(len(keys.page_ids) for keys in target)])
        page_ids = [page for keys in target for page in keys.page_ids]
        columns = [lengths[segments] - 1, segments, starts, np.array(page_ids)]
        device = self._parts.device
        positions, owners, page_starts, pages = to_device([column.astype(np.int32) for column in columns], device)
        return PagedRows(positions, owners, page_starts, pages, max_length=int(lengths.max()))

    def _eager(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._parts.rows_alone():
            return self._run_layers(*tensors)

    def _run_layers(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._bare_products or nullcontext():
            return self._run(*tensors)


def _adopt(layers: nn.Module, parts: ModelParts) -> None:
    """Move layers to the target's device, type and kind of products; buffers keep their types."""
    layers.to(parts.device)
    replace_linears(layers, parts.linear)
    for parameter in layers.parameters():
        parameter.data = parameter.data.to(parts.dtype)
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            raise AssertionError("a linear layer was left as it was")
