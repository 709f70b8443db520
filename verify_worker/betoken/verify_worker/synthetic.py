"""Forward of a simulated target: takes a given time, and its logits name one token for each position and previous id.

Needs a loaded model for its description and page sizes only; its weights are not used.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from betoken.common.synthetic import NUM_IDS, PREFIX, SimulatedTimes, next_id
from betoken.engine.batch import Batch
from betoken.engine.errors import ModelRefusedError
from betoken.engine.forward import Forward, StepOutput
from betoken.engine.parts import ModelParts
from betoken.engine.runner import ModelRunner
from betoken.engine.snapshots import StateCopy
from betoken.engine.step import StepContext
from betoken.engine.tree import KeptPath

_MARGIN = 1e4
"""Logit of the chosen token; others have 0, which no noise, bias or penalty makes up for."""


def simulated(runner: ModelRunner, times: SimulatedTimes) -> ModelRunner:
    """Return a runner of the same description whose forwards are simulated; model id and numerics say so.

    Raises:
        ModelRefusedError: the vocabulary is too small, or the model has recurrent states.
    """
    info = runner.info
    if info.vocab_size < NUM_IDS:
        raise ModelRefusedError(f"vocab_size: {info.vocab_size} is below {NUM_IDS}, which a synthetic target needs")
    if runner.state_bytes:
        raise ModelRefusedError("a synthetic target has no recurrent states: name another model")
    described = replace(
        info,
        model_id=PREFIX + info.model_id,
        weights_fingerprint=PREFIX + info.weights_fingerprint,
    )
    forward = SyntheticForward(runner.forward_of_model, info.vocab_size, info.eos_token_ids, times)
    made = ModelRunner(described, runner.page_table, forward, runner.max_num_batched_tokens)
    made.weight_bytes, made.kv_bytes = runner.weight_bytes, runner.kv_bytes
    return made


class SyntheticForward:
    """A `Forward` that computes nothing."""

    name = "synthetic"
    is_compiled = False
    can_compile = False
    state_bytes = 0

    def __init__(self, model: Forward, vocab_size: int, end_ids: Collection[int], times: SimulatedTimes) -> None:
        """`model`: forward of the loaded model, whose parts and timed token counts are this one's."""
        self._model = model
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._times = times

    @property
    def step(self) -> StepContext:
        """See `Forward`."""
        return self._model.step

    @property
    def parts(self) -> ModelParts:
        """See `Forward`."""
        return self._model.parts

    @property
    def timed_rows(self) -> Sequence[int]:
        """See `Forward`."""
        return self._model.timed_rows

    def __call__(self, batch: Batch) -> StepOutput:
        """Return logits after the time that the table has for the batch's tokens."""
        end_s = time.perf_counter() + self._times.seconds(batch.num_rows)
        rows = [(batch.positions[row] + 1, batch.token_ids[row]) for row in batch.logit_rows]
        ids = [next_id(position, previous_id, self._end_ids) for position, previous_id in rows]
        logits = torch.zeros(len(ids), self._vocab_size)
        logits[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)] = _MARGIN
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return StepOutput(logits)

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """Do nothing: the forward writes no KV."""

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Do nothing: models with states are rejected."""

    def compile(self, cache_dir: Path) -> None:
        """Do nothing: the forward has no code to compile."""

    def run_eagerly(self) -> None:
        """Do nothing: the forward has no code to compile."""
