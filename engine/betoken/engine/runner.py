"""Runs a transformers model over flat ragged batches with paged KV. It knows no requests, sampling or scheduling.

One thread owns a runner. Row r of the logits depends on its own sequence and position only, to the last bit.
`betoken.engine.bring_up` makes runners.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import transformers

from betoken.engine.batch import Batch, Segment, build_batch, note_applied, state_columns
from betoken.engine.forward import Forward, StepOutput
from betoken.engine.model_info import ModelInfo
from betoken.engine.page_table import PageTable
from betoken.engine.parts import ModelParts
from betoken.engine.step import added_vectors
from betoken.engine.tree import KeptPath


class BegunForward(NamedTuple):
    """A forward under way."""

    segments: Sequence[Segment]
    batch: Batch


class StagedForward(Protocol):
    """A forward in stages, of which the first may run a batch while the last runs an earlier one."""

    def begin(self, batch: Batch) -> None:
        """Begin to run a batch."""
        ...

    def finish(self, batch: Batch) -> StepOutput:
        """Return the results of the batch that was begun first."""
        ...


class ModelRunner:
    """A model ready to run, its KV pool and its page table."""

    def __init__(
        self,
        info: ModelInfo,
        page_table: PageTable,
        forward: Forward,
        max_num_batched_tokens: int,
        feature_layers: Sequence[int] = (),
        num_waiting: int = 0,
        stages: StagedForward | None = None,
        max_in_flight: int = 1,
    ) -> None:
        """Args:
        num_waiting: maximum number of tokens that wait next to a recurrent state; 0 for a model without states.
        stages: `forward`, if it runs in pipeline stages.
        max_in_flight: forwards of distinct sequences that may be begun at a time.
        """
        self.info = info
        self.page_table = page_table
        self.max_num_batched_tokens = max_num_batched_tokens
        self.logits_digest = ""
        """Hash of the logits after some fixed ids, 12 hex digits; set once the forward is final."""
        self.weight_bytes = 0
        """Bytes of the model's weights in the form they are kept in; set at the end of loading."""
        self.kv_bytes = 0
        """Bytes of all KV pages; set at the end of loading."""
        self.state_bytes = 0
        """Bytes of one sequence's recurrent states; 0 for a model without."""
        self.snapshot_bytes = 0
        """Bytes of one snapshot of the states; 0 without states."""
        self.feature_layers = tuple(feature_layers)
        """Layers whose hidden states forwards yield, ascending, numbered as in transformers' `output_hidden_states`:
        the last is the state after the final norm. See `StepOutput.features`."""
        self._forward = forward
        self._num_waiting = num_waiting
        self._stages = stages
        self.max_in_flight = max_in_flight
        """Forwards of distinct sequences that may be begun before the first of them finishes."""

    @property
    def forward_of_model(self) -> Forward:
        """Runs batches; `forward` checks them before."""
        return self._forward

    @property
    def parts(self) -> ModelParts:
        """Resources that drafters share with the model."""
        return self._forward.parts

    @property
    def snapshot_limit_bytes(self) -> int:
        """Most memory of snapshots of recurrent states."""
        snapshots = self.page_table.snapshots
        return snapshots.num_snapshots * self.snapshot_bytes if snapshots is not None else 0

    @property
    def is_compiled(self) -> bool:
        """Whether the forward runs as one compiled function."""
        return self._forward.is_compiled

    @property
    def can_compile(self) -> bool:
        """Whether `compile` may be called."""
        return self._forward.can_compile

    @property
    def timed_rows(self) -> Sequence[int]:
        """Row counts worth timing at load, ascending."""
        return self._forward.timed_rows

    @property
    def numerics(self) -> str:
        """Name of the arithmetic: runners of the same code with equal weights, dtype and name give equal bits."""
        how = "compiled" if self.is_compiled else "eager"
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        return f"{self._forward.name}, {how}, {versions}, logits {self.logits_digest}"

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> StepOutput:
        """Write the KV of the segments' tokens; return logits [sum(num_logits), V] float32, and features if wanted.

        Raises:
            ValueError: see `build_batch` and `added_vectors`; or a token id is outside the vocabulary, or a position
                beyond max_context.
        """
        return self.finish(self.begin(segments))

    @torch.inference_mode()
    def begin(self, segments: Sequence[Segment]) -> BegunForward:
        """Begin a forward, whose sequences are in no other one; at most `max_in_flight`. See `forward`."""
        batch = build_batch(segments, self.page_table.page_size, self.max_num_batched_tokens)
        self._check_range(batch)
        batch.added = added_vectors(segments)
        if batch.added is not None and not self._forward.step.adds_to_embeddings:
            raise ValueError("segments: vectors are added to embeddings only with EngineConfig.adds_to_embeddings")
        if self._num_waiting:
            batch.state_columns = state_columns(segments, self._num_waiting, self.page_table.page_size)
            if self.page_table.snapshots is not None and (copies := self.page_table.snapshots.take_copies()):
                self._forward.copy_states(copies)
        if self._stages is not None:
            self._stages.begin(batch)
        return BegunForward(segments, batch)

    @torch.inference_mode()
    def finish(self, begun: BegunForward) -> StepOutput:
        """Return the results of the forward that was begun first."""
        batch = begun.batch
        output = self._forward(batch) if self._stages is None else self._stages.finish(batch)
        if batch.state_columns is not None:
            note_applied(begun.segments, batch.state_columns)
        return output

    @torch.inference_mode()
    def compact(self, paths: Sequence[KeptPath]) -> None:
        """Turn accepted tree paths into chains: their KV is then stored as if only the path had been drafted."""
        self._forward.compact(paths)

    @torch.inference_mode()
    def compile(self, cache_dir: Path) -> None:
        """See `Forward.compile`."""
        self._forward.compile(cache_dir)

    def run_eagerly(self) -> None:
        """See `Forward.run_eagerly`."""
        self._forward.run_eagerly()

    def _check_range(self, batch: Batch) -> None:
        if min(batch.token_ids) < 0 or max(batch.token_ids) >= self.info.vocab_size:
            raise ValueError(f"segments: a token id is outside [0, {self.info.vocab_size})")
        if max(batch.positions) >= self.info.max_context:
            raise ValueError(f"segments: position {max(batch.positions)} is not below {self.info.max_context}")
