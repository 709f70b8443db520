"""A batch through the torch references, on any device: the specification of the faster ways.

It knows tensors and pages, not sequences or requests.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from betoken.engine.batch import Batch
from betoken.engine.cpu.row_elementwise import WholeVectors, one_torch_thread, whole_rows
from betoken.engine.features import NO_FEATURES, Features
from betoken.engine.forward import StepOutput, call_model
from betoken.engine.kv_pool import KvPool
from betoken.engine.paged_context import PagedContext, state_rows_of
from betoken.engine.parts import ModelParts
from betoken.engine.reference.block_linear import BlockLinear, BlockProducts
from betoken.engine.snapshots import StateCopy
from betoken.engine.state_pool import StatePool
from betoken.engine.step import StepContext
from betoken.engine.tree import KeptPath
from betoken.kernels.rows import PagedRows, TreePaths

_ROW_MULTIPLE = 4  # a GPU's stock matrix products are equal per row only for row counts of one multiple: 4 was tried


class ReferenceForward:
    """Eager model call over the torch references, on any device; rows padded to a multiple."""

    is_compiled = False
    can_compile = False
    timed_rows: Sequence[int] = (1, 2, 4, 6, 8, 16, 32)

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        scratch_page: int,
        features: Features = NO_FEATURES,
        states: StatePool | None = None,
    ) -> None:
        is_cuda = model.device.type == "cuda"
        device = torch.cuda.get_device_name(model.device) if is_cuda else torch.backends.cpu.get_cpu_capability()
        self.name = f"{model.device.type} {device}, reference kernels"
        self.parts = ModelParts(model, BlockLinear, nullcontext if is_cuda else whole_rows)
        self.parts.pool = pool
        self.step = StepContext()
        self._model = model
        self._pool = pool
        self._features = features
        self._states = states
        self._scratch_page = scratch_page  # scratch: padding rows write there
        self._whole_vectors: AbstractContextManager[Any] = nullcontext() if is_cuda else WholeVectors()
        self._block_products: AbstractContextManager[Any] = nullcontext() if is_cuda else BlockProducts()

    @property
    def state_bytes(self) -> int:
        """See `Forward`."""
        return 0 if self._states is None else self._states.state_bytes

    def __call__(self, batch: Batch) -> StepOutput:
        """See `Forward`."""
        self.step.begin(batch)
        num_padding = -batch.num_rows % _ROW_MULTIPLE
        kept = batch.logit_rows + [0] * (-len(batch.logit_rows) % _ROW_MULTIPLE)
        rows = self._padded_rows(batch, num_padding)
        with one_torch_thread(), self._whole_vectors, self._block_products:
            results = call_model(
                self._model,
                PagedContext(self._pool, rows, self._states, state_rows_of(batch, rows, self._model.device)),
                self._features,
                torch.tensor([batch.token_ids + [0] * num_padding], device=self._model.device),
                torch.tensor([batch.positions + [0] * num_padding], device=self._model.device),
                torch.tensor(kept or [0] * _ROW_MULTIPLE, device=self._model.device),
            )
        return StepOutput.of(results, len(batch.logit_rows), batch.num_rows)

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """See `Forward`."""
        self._pool.compact(paths)
        if self._states is not None:
            self._states.compact(paths)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """See `Forward`."""
        assert self._states is not None
        self._states.copy(copies)

    def compile(self, cache_dir: Path) -> None:
        """See `Forward`."""
        raise AssertionError("the references do not compile: see `can_compile`")

    def run_eagerly(self) -> None:
        """See `Forward`."""

    def _padded_rows(self, batch: Batch, num_padding: int) -> PagedRows:
        """The batch's rows and one more segment: token 0 at position 0 of no sequence."""
        positions, segments, page_starts, page_ids, path_starts, path_slots = (part.tolist() for part in batch.parts())
        columns = [
            positions + [0] * num_padding,
            segments + [batch.num_segments] * num_padding,
            page_starts + [len(page_ids) + 1],
            page_ids + [self._scratch_page],
        ]
        if batch.has_trees:
            columns += [path_starts + [len(path_slots)] * num_padding, path_slots]
        tensors = [torch.tensor(column, dtype=torch.int32, device=self._model.device) for column in columns]
        paths = TreePaths(tensors[4], tensors[5]) if batch.has_trees else None
        return PagedRows(tensors[0], tensors[1], tensors[2], tensors[3], paths)
