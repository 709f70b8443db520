"""Runs one batch through a model on any device, and returns its logits.

Every row has the same bits whatever its neighbours. Implementations know tensors and pages, not sequences or requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext
from betoken.engine.batch import Batch
from betoken.engine.features import Features
from betoken.engine.parts import ModelParts
from betoken.engine.snapshots import StateCopy
from betoken.engine.step import StepContext
from betoken.engine.tree import KeptPath

ModelCall = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""token ids [1, R], positions [1, R], indices of the rows that yield logits [L] -> logits [L, V] float32, and where
features are wanted, those [R, num_layers, H] of the model's dtype."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one forward. Both tensors may be overwritten by the next forward."""

    logits: Tensor
    """Logits [L, V] float32 of the rows that asked for them, in the order of the batch."""
    features: Tensor | None = None
    """Hidden states [R, num_layers, H] of `ModelRunner.feature_layers` in the model's dtype, of all rows of the batch;
    None if no layer is requested."""

    @classmethod
    def of(cls, results: Sequence[Tensor], num_logits: int, num_rows: int) -> "StepOutput":
        """A `ModelCall`'s results, without its padding."""
        features = results[1][:num_rows] if len(results) > 1 else None
        return cls(results[0][:num_logits], features)

    def copy(self) -> "StepOutput":
        """Results that the next forward does not overwrite."""
        return StepOutput(self.logits.clone(), None if self.features is None else self.features.clone())


class Forward(Protocol):
    """Runs batches over one model and one KV pool."""

    @property
    def name(self) -> str:
        """Device and kernels: what the bits depend on besides weights and batch."""
        ...

    @property
    def step(self) -> StepContext:
        """The step that runs, for linear layers."""
        ...

    @property
    def parts(self) -> ModelParts:
        """The parts of the model that drafters share."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states; 0 for a model without."""
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
        """Move the KV of accepted tree paths to the slots of chains."""
        ...

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states to snapshots and back, one after the other."""
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
    model: Any,
    context: AttentionContext,
    features: Features,
    token_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
) -> tuple[Tensor, ...]:
    """One call of a transformers model, as a `ModelCall`."""
    output = model(
        input_ids=token_ids,
        position_ids=positions,
        logits_to_keep=logit_rows,
        use_cache=False,
        **features.keywords(),
        **{CONTEXT_KEYWORD: context},
    )
    logits: Tensor = output.logits[0].float()  # float32 sums of our linear layer, scaled by the model
    return (logits, *features.results(output))
