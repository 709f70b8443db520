"""A batch through a model on a GPU: a captured graph of the bucket that holds its rows, or eagerly beyond the largest.

Graph or eager, whatever the bucket: a row has the same bits. It knows tensors and pages, not sequences or requests.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from betoken.engine.batch import Batch
from betoken.engine.compiled import EXAMPLE_LOGITS, EXAMPLE_ROWS
from betoken.engine.cuda.buckets import choose_bucket, length_bounds
from betoken.engine.cuda.compiled import compile_call
from betoken.engine.cuda.graphs import Recorder
from betoken.engine.cuda.operators import BatchContext
from betoken.engine.cuda.recorded import RecordedForwards
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_invariance import RowInvariance
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.cuda.step_inputs import StepInputs
from betoken.engine.features import NO_FEATURES, Features
from betoken.engine.forward import ModelCall, StepOutput, call_model
from betoken.engine.kv_pool import KvPool
from betoken.engine.paged_context import PagedContext
from betoken.engine.parts import ModelParts
from betoken.engine.snapshots import StateCopy
from betoken.engine.step import StepContext
from betoken.engine.tree import KeptPath


class CudaForward:
    """Eager until `record` was called. The last page of the pool is the scratch page: padding rows write there."""

    state_bytes = 0
    can_compile = False  # it is compiled before it is recorded, not after it was checked
    timed_rows: Sequence[int] = (1, 2, 4, 6, 8, 16, 32, 64, 128)

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        max_context: int,
        name: str,
        is_row_invariant: bool,
        features: Features = NO_FEATURES,
    ) -> None:
        self.name = name
        self.is_compiled = False
        self._model = model
        self.parts = ModelParts(model, RowLinear, RowInvariance, use_row_experts)
        self._device: torch.device = model.device
        self._context = BatchContext()
        self.step = StepContext()
        self._lengths = length_bounds(max_context)
        self._recorded: RecordedForwards | None = None
        self.use_pool(pool)

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            mode: AbstractContextManager[Any] = RowInvariance() if is_row_invariant else nullcontext()
            with mode:
                return call_model(model, self._context, features, *tensors)

        self.model_call: ModelCall = call

    @property
    def lengths(self) -> Sequence[int]:
        """The bounds on the longest sequence that forwards are recorded for, ascending."""
        return self._lengths

    def use_pool(self, pool: KvPool) -> None:
        """Keep keys and values there from now on; forgets what was recorded over another pool."""
        self._pool = self.parts.pool = pool
        self._scratch_page = pool.num_pages - 1
        self._recorded = None

    def __call__(self, batch: Batch) -> StepOutput:
        """See `Forward`."""
        length = choose_bucket(self._lengths, max(batch.positions) + 1)
        assert length is not None, "the runner refuses positions beyond max_context"
        added = self._added(batch.num_rows) if batch.added is None else (batch.added,)
        results = None if self._recorded is None else self._recorded.replay(batch, added)
        if results is None:
            results = self._run(StepInputs.for_batch(batch, self._scratch_page, self._device), length, added)
        return StepOutput.of(results, len(batch.logit_rows), batch.num_rows)

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """See `Forward`."""
        self._pool.compact(paths)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """See `Forward`."""
        raise AssertionError("a model with recurrent states does not run here")

    def compile(self, cache_dir: Path) -> None:
        """See `Forward`."""
        inputs = StepInputs(EXAMPLE_ROWS, EXAMPLE_LOGITS, 1, self._scratch_page, self._device)
        self._context.paged = PagedContext(self._pool, inputs.make_rows(self._lengths[0]))
        self.step.begin_recorded(inputs.token_adapters)
        self.model_call = compile_call(self.model_call, inputs.model_arguments(), self._model, cache_dir)
        self.is_compiled = True

    def run_eagerly(self) -> None:
        """See `Forward`."""
        raise AssertionError("recorded graphs keep the compiled model: see `can_compile`")

    @torch.inference_mode()
    def run_padding(self, num_rows: int) -> tuple[Tensor, ...]:
        """A forward of padding rows alone, all with logits [num_rows, V]; it takes the memory of the longest."""
        return self._run(StepInputs(num_rows, num_rows, 1, self._scratch_page, self._device), self._lengths[-1])

    def record(self, sizes: Sequence[int], recorder: Recorder, progress: Callable[[float], None]) -> None:
        """Record forwards for each number of rows, given in ascending order; `progress` gets the fraction done."""
        recorded = RecordedForwards(sizes, self._lengths)
        places = (self._scratch_page, self._pool.page_size, self._device)
        recorded.record(self._run, *places, recorder, self._added, progress)
        self._recorded = recorded

    def _added(self, num_rows: int) -> tuple[Tensor, ...]:
        """Vectors [num_rows, H] that change no embedding, if the model adds any: an input of recorded forwards."""
        if not self.step.adds_to_embeddings:
            return ()
        return (torch.zeros(num_rows, self.parts.hidden_size, dtype=self.parts.dtype, device=self._device),)

    def _run(self, inputs: StepInputs, length: int, added: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        self._context.paged = PagedContext(self._pool, inputs.make_rows(length))
        self.step.begin_recorded(inputs.token_adapters, *added)
        return self.model_call(*inputs.model_arguments())
