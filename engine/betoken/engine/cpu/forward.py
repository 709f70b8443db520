"""A batch through a model on a CPU, over its own kernels: eagerly, or as one compiled function.

It knows tensors and pages, not sequences or requests.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.batch import Batch, Segment, build_batch
from betoken.engine.compiled import EXAMPLE_LOGITS, EXAMPLE_ROWS
from betoken.engine.cpu.compiled import COMPILE_OPTIONS, compile_call
from betoken.engine.cpu.experts import BareProducts, use_packed_experts
from betoken.engine.cpu.grouped_linear import pack_grouped_layers
from betoken.engine.cpu.kept_code import KeptCode
from betoken.engine.cpu.row_elementwise import WholeVectors, one_torch_thread, whole_rows
from betoken.engine.cpu.row_linear import PackedLinear
from betoken.engine.errors import ModelRefusedError
from betoken.engine.features import NO_FEATURES, Features
from betoken.engine.forward import ModelCall, StepOutput, call_model
from betoken.engine.kv_pool import KvPool
from betoken.engine.parts import ModelParts
from betoken.engine.snapshots import StateCopy
from betoken.engine.state_pool import StatePool
from betoken.engine.step import StepContext
from betoken.engine.tree import KeptPath
from betoken.engine.weights.activations import rounds_rows
from betoken.engine.weights.layers import replace_linears
from betoken.kernels.build import BuildError, cpu_isa
from betoken.kernels.cpu import CpuCache, CpuKernels
from betoken.kernels.cpu.recurrent import StateCache, load_recurrent_kernels
from betoken.kernels.linear_recurrence.rule import Recurrence


class CpuContext:
    """Attention context that holds the batch and caches of the thread's current step."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `AttentionContext.attend`."""
        out: Tensor = torch.ops.betoken.attend(query, key, value, layer, *scoring)
        return out

    def convolve_states(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `AttentionContext.convolve_states`."""
        out: Tensor = torch.ops.betoken.state_conv(x, weight, bias, layer)
        return out

    def recur(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        rule: Recurrence,
        rates: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext.recur`."""
        out: Tensor = torch.ops.betoken.recur(query, key, value, gates, layer, rates, *rule)
        return out

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `AttentionContext.convolve`."""
        out: Tensor = torch.ops.betoken.short_conv(x, weight, bias, layer)
        return out


class ModelCallStack:
    """The model call and what is wrapped around it: products redirected to our kernels, whole vectors.

    A wrapper costs time on every call. The first call shows which ones the model needs; `settle` drops the others.
    """

    def __init__(self, model: Any, features: Features) -> None:
        self._model = model
        self._features = features
        self._context = CpuContext()
        self._bare_products, self._whole_vectors = BareProducts(model), WholeVectors()
        self._redirects, self._widens = True, True

    def traceable(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The input of a compiled forward; the compiler handles whole vectors itself."""
        if not self._redirects:
            return self._bare(*tensors)
        with self._bare_products:
            return self._bare(*tensors)

    def eager(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The eager forward."""
        if not self._widens:
            return self.traceable(*tensors)
        with self._whole_vectors:
            return self.traceable(*tensors)

    def settle(self) -> None:
        """Drop the wrappers that the calls so far had no use for."""
        self._redirects = bool(self._bare_products.num_redirected)
        self._widens = self._whole_vectors.is_needed

    def _bare(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with one_torch_thread():
            return call_model(self._model, self._context, self._features, *tensors)


class CpuForward:
    """Eager or compiled model call over the CPU kernels. Changes the model's layers in place."""

    can_compile = True
    timed_rows: Sequence[int] = (1, 2, 4, 6, 8, 16, 32)

    def __init__(
        self,
        model: Any,
        kernels: CpuKernels,
        pool: KvPool,
        features: Features = NO_FEATURES,
        states: StatePool | None = None,
        progress: Callable[[float], None] = lambda fraction: None,
        kept_code: KeptCode | None = None,
    ) -> None:
        """The pool's last page is the scratch page: it belongs to no sequence.

        Args:
            progress: called with the fraction of quantised layers packed so far.
            kept_code: file of the compiled forward; None = not kept.

        Raises:
            ModelRefusedError: the model has states, and the kernels over them cannot be built.
        """
        self.step = StepContext()
        capability = torch.backends.cpu.get_cpu_capability()
        self.name = f"cpu {capability}, {kernels.products} kernels of {kernels.compiler} for {cpu_isa()}"
        if rounds_rows(model):
            self.name += ", int8 activations"
        self._pool = pool
        self._states = states
        self._state_cache = None if states is None else _state_cache(states)
        self._model = model
        self.parts = ModelParts(model, PackedLinear, whole_rows, lambda other: use_packed_experts(other, kernels))
        self.parts.pool = pool
        self._cache: CpuCache = kernels.create_cache(pool.keys, pool.values)
        use_packed_experts(model, kernels)
        replace_linears(model, PackedLinear)
        pack_grouped_layers(model, kernels, progress)
        self._calls = ModelCallStack(model, features)
        self._is_settled = False
        self._compiled: ModelCall | None = None
        self._kept_code = kept_code

    @property
    def is_compiled(self) -> bool:
        """See `Forward`."""
        return self._compiled is not None

    @property
    def state_bytes(self) -> int:
        """See `Forward`."""
        return 0 if self._states is None else self._states.state_bytes

    def __call__(self, batch: Batch) -> StepOutput:
        """See `Forward`."""
        call = self._compiled or self._calls.eager
        results = call(*self._begin(batch))
        if not self._is_settled:  # the first forward has met all the model's operations
            self._calls.settle()
            self._is_settled = True
        return StepOutput.of(results, len(batch.logit_rows), batch.num_rows)

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """See `Forward`."""
        self._pool.compact(paths)
        if self._states is not None:
            self._states.compact(paths)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """See `Forward`."""
        if self._states is not None:  # None on a pipeline stage whose layers have no states
            self._states.copy(copies)

    def compile(self, cache_dir: Path) -> None:
        """See `Forward`."""
        if self._kept_code is not None and (found := self._kept_code.load(self._model, COMPILE_OPTIONS, cache_dir)):
            self._compiled = found
            return
        scratch = [self._pool.num_pages - 1] * -(-EXAMPLE_ROWS // self._pool.page_size)
        example = build_batch(
            [Segment(scratch, 0, [0] * EXAMPLE_ROWS, EXAMPLE_LOGITS)], self._pool.page_size, EXAMPLE_ROWS
        )
        self(example)  # packs what no linear layer owns, which a tracer could not
        self._compiled = compile_call(
            self._calls.traceable, self._begin(example), self._model, cache_dir, self._kept_code
        )

    def run_eagerly(self) -> None:
        """See `Forward`."""
        self._compiled = None

    def _begin(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Begin the batch's step on this thread and return the model call's arguments."""
        self.step.begin(batch)
        self._cache.begin_step(batch.layout, batch.num_rows, batch.num_segments, batch.has_trees)
        if self._state_cache is not None and self._states is not None:
            columns = batch.state_columns
            if columns is None:
                columns = np.zeros((4, batch.num_segments), np.int32)
            self._state_cache.begin_step(batch.layout, columns, batch.num_rows, batch.num_segments, batch.has_trees)
            self._columns = columns  # kept alive through the step
        return _integers([batch.token_ids]), _integers([batch.positions]), _integers(batch.logit_rows or [0])


def _state_cache(states: StatePool) -> StateCache:
    try:
        kernels = load_recurrent_kernels()
    except (BuildError, OSError) as error:
        raise ModelRefusedError(f"the kernels over recurrent states cannot be built: {error}") from error
    assert kernels is not None, "the CPU kernels are loaded"
    return kernels.create_cache(states.layers())


def _integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))  # torch.tensor takes three to six times as long
