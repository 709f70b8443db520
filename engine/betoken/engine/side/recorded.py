"""Calls of side layers recorded as CUDA graphs, by number of rows and bound on the longest sequence.

A batch is padded to the next recorded number of rows; see `cuda.forward`, which does it for a target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.engine.batch import Batch
from betoken.engine.cuda.buckets import bucket_sizes, choose_bucket, length_bounds, tail_size
from betoken.engine.cuda.graphs import Recorder
from betoken.engine.cuda.step_inputs import StepInputs

RunStep = Callable[[StepInputs, int, Sequence[Tensor]], tuple[Tensor, ...]]
"""A step, the bound on its longest sequence, inputs of the layers [B, ...] -> results [B, ...]."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The recordings of one number of rows."""

    step: StepInputs
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]
    """Written by every replay."""
    replays: dict[int, Callable[[], None]]
    """By the bound on the longest sequence."""


class RecordedCalls:
    """Recordings of up to `max_rows` rows of sequences of up to `max_length` tokens."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self._sizes = bucket_sizes(max_rows)
        self._lengths = length_bounds(max_length)
        self._buckets: dict[int, _Bucket] = {}

    @torch.inference_mode()
    def record(
        self,
        run: RunStep,
        make_inputs: Callable[[int], Sequence[Tensor]],
        make_step: Callable[[int, int], StepInputs],
        page_size: int,
        recorder: Recorder,
    ) -> None:
        """Args:
        make_inputs: number of rows -> inputs of padding rows.
        make_step: number of rows, size of the tail -> step of padding rows.
        """
        for size in reversed(self._sizes):  # the memory of a larger recording serves the smaller ones
            step, inputs = make_step(size, tail_size(size, self._lengths[-1], page_size)), make_inputs(size)
            results = [torch.empty_like(result) for result in run(step, self._lengths[-1], inputs)]
            bucket = _Bucket(step, inputs, results, {})
            for length in reversed(self._lengths):
                bucket.replays[length] = recorder.record(_writing(run, bucket, length))
            self._buckets[size] = bucket

    def replay(self, batch: Batch, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Results of the rows with logits [L, ...]; None if no recording holds the batch."""
        size = choose_bucket(self._sizes, batch.num_rows)
        length = choose_bucket(self._lengths, max(batch.positions) + 1)
        if size is None or length is None or not (bucket := self._buckets[size]).step.fits(batch):
            return None
        bucket.step.fill(batch)
        for kept, given in zip(bucket.inputs, inputs, strict=True):
            kept[: len(given)].copy_(given)
        bucket.replays[length]()
        return tuple(result[: len(batch.logit_rows)].clone() for result in bucket.results)


def _writing(run: RunStep, bucket: _Bucket, length: int) -> Callable[[], None]:
    def write() -> None:
        for kept, result in zip(bucket.results, run(bucket.step, length, bucket.inputs), strict=True):
            kept.copy_(result)

    return write
