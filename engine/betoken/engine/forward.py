"""The two ways a batch goes through a model: with the CPU kernels, or with the torch references.

Both give every row the same bits whatever its neighbours. They know tensors and pages, not sequences or requests.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext, Scoring
from betoken.engine.batch import Batch
from betoken.engine.cpu.experts import BareProducts, use_packed_experts
from betoken.engine.cpu.row_elementwise import WholeVectors
from betoken.engine.cpu.row_linear import PackedLinear, replace_linears
from betoken.engine.kv_pool import KvPool, PagedContext
from betoken.kernels.cpu import CpuCache, CpuKernels
from betoken.kernels.rows import PagedRows, TreePaths

ModelCall = Callable[[Tensor, Tensor, Tensor], Tensor]
"""token ids [1, R], positions [1, R], indices of the rows that yield logits [L] -> logits [L, V]."""

_ROW_MULTIPLE = 4  # stock matrix products are equal per row only for row counts of one multiple: 4 is what was tried


class Forward(Protocol):
    """Runs one batch: writes its KV, returns logits [len(batch.logit_rows), V]."""

    name: str
    """Device and kernels: what the bits depend on besides weights and batch."""

    @property
    def pool(self) -> KvPool:
        """Where it keeps keys and values."""
        ...

    def __call__(self, batch: Batch) -> Tensor: ...


def call_model(
    model: Any, context: AttentionContext, token_ids: Tensor, positions: Tensor, logit_rows: Tensor
) -> Tensor:
    """One call of a transformers model, as a `ModelCall`."""
    output = model(
        input_ids=token_ids,
        position_ids=positions,
        logits_to_keep=logit_rows,
        use_cache=False,
        **{CONTEXT_KEYWORD: context},
    )
    logits: Tensor = output.logits[0]
    return logits


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's own operators on the calling thread alone; the CPU kernels keep their threads.

    Torch divides elements among threads wherever that falls, and what is left over of a part's last vector goes through
    scalar code that rounds `silu` and `gelu` otherwise: a row's bits would depend on the number of rows.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class CpuContext:
    """Attention context whose batch and caches are those of the step that the thread has begun."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `AttentionContext.attend`."""
        out: Tensor = torch.ops.betoken.attend(query, key, value, layer, *scoring)
        return out


class CpuForward:
    """Eager or compiled model call over the CPU kernels. Changes the model's layers in place."""

    def __init__(self, model: Any, kernels: CpuKernels, pool: KvPool) -> None:
        capability = torch.backends.cpu.get_cpu_capability()
        self.name = f"cpu {capability}, {kernels.products} kernels of {kernels.compiler}"
        self.pool = pool
        self._cache: CpuCache = kernels.create_cache(pool.keys, pool.values)
        context = CpuContext()
        use_packed_experts(model)
        replace_linears(model, PackedLinear)
        bare_products, whole_vectors = BareProducts(model), WholeVectors()

        def call(*tensors: Tensor) -> Tensor:
            with one_torch_thread():
                return call_model(model, context, *tensors)

        def call_redirected(*tensors: Tensor) -> Tensor:
            with bare_products:
                return call(*tensors)

        def call_in_whole_vectors(*tensors: Tensor) -> Tensor:
            with whole_vectors:
                return self.traceable_call(*tensors)

        self.traceable_call: ModelCall = call_redirected
        """What a compiler takes, which cares for whole vectors itself."""
        self.eager_call: ModelCall = call_in_whole_vectors
        self.model_call: ModelCall | None = None
        """What forwards call once the first, which is eager, has met all the model's operations."""

        def leave_out_what_nothing_needs() -> None:
            if not bare_products.num_redirected:
                self.traceable_call = call
            if not whole_vectors.is_needed:
                self.eager_call = self.traceable_call

        self._after_first = leave_out_what_nothing_needs  # each costs time on every call

    def begin(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Begin the batch's step on this thread and return the model call's arguments."""
        self._cache.begin_step(batch.layout, batch.num_rows, batch.num_segments, batch.has_trees)
        return _integers([batch.token_ids]), _integers([batch.positions]), _integers(batch.logit_rows or [0])

    def __call__(self, batch: Batch) -> Tensor:
        if self.model_call is None:
            logits = self.eager_call(*self.begin(batch))
            self._after_first()
            self.model_call = self.eager_call
        else:
            logits = self.model_call(*self.begin(batch))
        return logits if batch.logit_rows else logits[:0]


class ReferenceForward:
    """Eager model call over the torch references, on any device; rows padded to a multiple."""

    def __init__(self, model: Any, pool: KvPool, scratch_page: int) -> None:
        is_cuda = model.device.type == "cuda"
        device = torch.cuda.get_device_name(model.device) if is_cuda else torch.backends.cpu.get_cpu_capability()
        self.name = f"{model.device.type} {device}, reference kernels"
        self._model = model
        self.pool = pool
        self._scratch_page = scratch_page  # belongs to nobody: padding rows write there
        self._whole_vectors: AbstractContextManager[Any] = nullcontext() if is_cuda else WholeVectors()

    def __call__(self, batch: Batch) -> Tensor:
        num_padding = -batch.num_rows % _ROW_MULTIPLE
        kept = batch.logit_rows + [0] * (-len(batch.logit_rows) % _ROW_MULTIPLE)
        with one_torch_thread(), self._whole_vectors:
            logits = call_model(
                self._model,
                PagedContext(self.pool, self._padded_rows(batch, num_padding)),
                torch.tensor([batch.token_ids + [0] * num_padding], device=self._model.device),
                torch.tensor([batch.positions + [0] * num_padding], device=self._model.device),
                torch.tensor(kept or [0] * _ROW_MULTIPLE, device=self._model.device),
            )
        return logits[: len(batch.logit_rows)]

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


def _integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))  # torch.tensor takes three to six times as long
