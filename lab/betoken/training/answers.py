"""A model's own answers to prompts, made by the engine: many sequences in one forward, each with its own noise.

An answer depends on its prompt, its seed and the weights alone, so an interrupted run resumes.
It knows ids and pages; it knows no training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.training.samples import Sample, read_samples, write_sample

log = logging.getLogger("betoken.training")

MAX_STREAMS = 64
LOG_EVERY_S = 20.0

ParamsOf = Callable[[int], SamplingParams]
"""Index of a prompt -> how its answer is chosen."""


@dataclass(slots=True, eq=False)
class _Stream:
    index: int
    prompt: list[int]
    params: SamplingParams
    page_ids: list[int] = field(default_factory=list)
    kv_length: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        ends = not self.params.ignore_eos and bool(self.output) and self.output[-1] in self.params.eos_token_ids
        return ends or len(self.output) >= self.params.max_new_tokens

    @property
    def num_waiting(self) -> int:
        """Ids without KV."""
        return len(self.prompt) + len(self.output) - self.kv_length

    def waiting_ids(self, num: int) -> list[int]:
        if self.output:
            return self.output[-num:]
        return self.prompt[self.kv_length : self.kv_length + num]


def cycled_params(
    runner: ModelRunner, temperatures: Sequence[float], max_new_tokens: int, seed: int, ignore_eos: bool = False
) -> ParamsOf:
    """Temperatures in turn, and a separate seed for every prompt."""
    eos = runner.info.eos_token_ids

    def params_of(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperatures[index % len(temperatures)],
            seed=(seed << 32) + index,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos,
            ignore_eos=ignore_eos,
        )

    return params_of


def generate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], params_of: ParamsOf, on_answer: Callable[[int, Sample], None]
) -> None:
    """Answer all prompts and hand each on, with its index, as soon as it is whole.

    A prompt that leaves no room for an answer of `max_new_tokens` loses its beginning.
    """
    room = min(runner.info.max_context, runner.page_table.num_pages * runner.page_table.page_size)
    pending = iter(enumerate(prompts))
    streams: list[_Stream] = []
    exhausted = False
    while True:
        while not exhausted and len(streams) < min(MAX_STREAMS, runner.max_num_batched_tokens):
            if (following := next(pending, None)) is None:
                exhausted = True
                break
            index, ids = following
            params = params_of(index)
            streams.append(_Stream(index, list(ids)[-max(1, room - params.max_new_tokens) :], params))
        if not streams:
            return
        _step(runner, streams)
        for stream in [stream for stream in streams if stream.is_done]:
            streams.remove(stream)
            runner.page_table.release(stream.page_ids)
            on_answer(stream.index, Sample((*stream.prompt, *stream.output), len(stream.prompt)))


def _step(runner: ModelRunner, streams: list[_Stream]) -> None:
    """One forward: a token for every stream whose prompt has its KV, and the next part of prompts that wait."""
    table, rows_left = runner.page_table, runner.max_num_batched_tokens
    batch: list[tuple[_Stream, int]] = []
    for stream in sorted(streams, key=lambda stream: (stream.num_waiting > 1, stream.index)):
        num = min(stream.num_waiting, rows_left)
        if num < 1 or not table.can_extend(stream.page_ids, stream.kv_length + num):
            continue
        table.extend(stream.page_ids, stream.kv_length + num)
        batch.append((stream, num))
        rows_left -= num
    if not batch:  # no sequence fits the full table: the youngest restarts when there is room
        table.release(streams[-1].page_ids)
        streams[-1].kv_length, streams[-1].output = 0, []
        return
    segments = []
    chosen: list[_Stream] = []
    for stream, num in batch:
        is_whole = num == stream.num_waiting
        segments.append(Segment(stream.page_ids, stream.kv_length, stream.waiting_ids(num), int(is_whole)))
        stream.kv_length += num
        if is_whole:
            chosen.append(stream)
    logits = runner.forward(segments).logits
    if chosen:
        groups = [SampleGroup(stream.params, stream.prompt, stream.output, []) for stream in chosen]
        for stream, token_id in zip(chosen, choose_tokens(logits, groups).token_ids, strict=True):
            stream.output.append(token_id)


def write_answers(
    runner_of: Callable[[], ModelRunner],
    prompts: Sequence[Sequence[int]],
    params: Callable[[ModelRunner], ParamsOf],
    path: Path,
) -> list[Sample]:
    """Answers to all prompts in their order, kept in `path`; existing ones are not generated again.

    The model is loaded where something is missing only.
    """
    samples = read_samples(path)[: len(prompts)]
    if len(samples) == len(prompts):
        return samples
    path.parent.mkdir(parents=True, exist_ok=True)
    runner = runner_of()
    params_of, first = params(runner), len(samples)
    waiting: dict[int, Sample] = {}
    started = logged = time.monotonic()
    num_tokens = 0
    with path.open("w") as file:  # again whole: what was cut off goes
        file.writelines(write_sample(sample) for sample in samples)

        def keep(index: int, sample: Sample) -> None:
            nonlocal logged, num_tokens
            num_tokens += len(sample.ids) - sample.prompt_length
            waiting[first + index] = sample
            while (following := waiting.pop(len(samples), None)) is not None:
                samples.append(following)
                file.write(write_sample(following))
            if (now := time.monotonic()) - logged >= LOG_EVERY_S:
                logged = now
                file.flush()
                speed = num_tokens / (now - started)
                log.info("%s: %d of %d answers | %.0f tokens/s", path.stem, len(samples), len(prompts), speed)

        generate(runner, prompts[first:], lambda index: params_of(first + index), keep)
    return samples
