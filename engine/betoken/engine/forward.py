"""Runs one batch through a model on any device, and returns its logits.

Every row has the same bits whatever its neighbours. Implementations know tensors and pages, not sequences or requests.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext
from betoken.engine.batch import Batch
from betoken.engine.tree import KeptPath

ModelCall = Callable[[Tensor, Tensor, Tensor], Tensor]
"""token ids [1, R], positions [1, R], indices of the rows that yield logits [L] -> logits [L, V] float32."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one forward. Both tensors may be overwritten by the next forward."""

    logits: Tensor
    """Logits [L, V] float32 of the rows that asked for them, in the order of the batch."""
    features: Tensor | None = None
    """Hidden states [R, num_layers, H] of the layers a drafter named; None where none is attached."""


class Forward(Protocol):
    """Runs batches over one model and one KV pool."""

    @property
    def name(self) -> str:
        """Device and kernels: what the bits depend on besides weights and batch."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether the model runs as one compiled function."""
        ...

    @property
    def can_compile(self) -> bool:
        """Whether `compile` may be called now."""
        ...

    @property
    def timed_rows(self) -> Sequence[int]:
        """Row counts worth timing at load, ascending."""
        ...

    def __call__(self, batch: Batch) -> StepOutput:
        """Write the batch's KV and return what it yields."""
        ...

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """Move the KV of accepted tree paths to where chains would lie."""
        ...

    def compile(self, cache_dir: Path) -> None:
        """Run the model as one compiled function from now on; its code is kept in `cache_dir`.

        Raises:
            Exception: whatever the tracer or the compiler raises for a model they cannot take.
        """
        ...

    def run_eagerly(self) -> None:
        """Leave what `compile` made."""
        ...


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
    return logits.float()  # they are, from a linear layer of ours and whatever the model scales them by


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's own operators on the calling thread alone; the CPU kernels keep their threads.

    Torch divides elements among threads wherever that falls. The last elements of a part's vector go through scalar
    code that rounds `silu` and `gelu` otherwise: a row's bits would depend on the number of rows.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
