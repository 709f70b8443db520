"""Forwards recorded as CUDA graphs, by number of rows and bound on the longest sequence.

A batch is padded to the next recorded number of rows. Targets and the layers of drafters share it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.engine.batch import Batch
from betoken.engine.cuda.buckets import choose_bucket, tail_size
from betoken.engine.cuda.graphs import Recorder
from betoken.engine.cuda.step_inputs import StepInputs

RunStep = Callable[[StepInputs, int, Sequence[Tensor]], tuple[Tensor, ...]]
"""A step, the bound on its longest sequence, further inputs [B, ...] -> results [B, ...]."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The recordings of one number of rows."""

    step: StepInputs
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]
    """Written by every replay."""
    replays: dict[int, Callable[[], None]]
    """By the bound on the longest sequence."""


class RecordedForwards:
    """The recordings of a forward."""

    def __init__(self, sizes: Sequence[int], lengths: Sequence[int]) -> None:
        """`sizes`: numbers of rows; `lengths`: bounds on the longest sequence; both ascending."""
        self._sizes, self._lengths = sizes, lengths
        self._buckets: dict[int, _Bucket] = {}

    @torch.inference_mode()
    def record(
        self,
        run: RunStep,
        scratch_page: int,
        page_size: int,
        device: torch.device,
        recorder: Recorder,
        make_inputs: Callable[[int], Sequence[Tensor]] = lambda num_rows: (),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """Args:
        scratch_page: page of padding rows.
        make_inputs: number of rows -> further inputs of padding rows.
        progress: receives the fraction done.
        """
        shared: list[Tensor] = []  # one for all: what a step yields is read before the next
        for size in reversed(self._sizes):  # the memory of a larger recording serves the smaller ones
            progress(len(self._buckets) / len(self._sizes))
            step = StepInputs(size, size, tail_size(size, self._lengths[-1], page_size), scratch_page, device)
            inputs = make_inputs(size)
            shared = shared or [torch.empty_like(result) for result in run(step, self._lengths[-1], inputs)]
            bucket = _Bucket(step, inputs, [result[:size] for result in shared], {})
            for length in reversed(self._lengths):
                bucket.replays[length] = recorder.record(_writing(run, bucket, length))
            self._buckets[size] = bucket

    def replay(self, batch: Batch, inputs: Sequence[Tensor] = ()) -> tuple[Tensor, ...] | None:
        """Results [B, ...], which the next replay overwrites; None if no recording holds the batch."""
        size = choose_bucket(self._sizes, batch.num_rows)
        length = choose_bucket(self._lengths, max(batch.positions) + 1)
        if size is None or length is None or not (bucket := self._buckets[size]).step.fits(batch):
            return None
        bucket.step.fill(batch)
        for kept, given in zip(bucket.inputs, inputs, strict=True):
            kept[: len(given)].copy_(given)
        bucket.replays[length]()
        return tuple(bucket.results)


def _writing(run: RunStep, bucket: _Bucket, length: int) -> Callable[[], None]:
    def write() -> None:
        for kept, result in zip(bucket.results, run(bucket.step, length, bucket.inputs), strict=True):
            kept.copy_(result)

    return write
