"""A request with its answer so far, then with its place on a verify worker.

Knows text and counters, no rounds.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NamedTuple

from betoken.common.errors import InvalidArgumentError
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.events import Finished
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.answer import Answer
from betoken.router.text.tokenizer import Tokenizer
from betoken.router.workers.verify_worker import VerifyWorker

_RESUMED_AT_ONCE = 64  # ids; half a millisecond with the most and longest stop strings


@dataclass(frozen=True, slots=True)
class Generation:
    """One request with its answer so far."""

    request: GenerationRequest
    answer: Answer
    counts: SpeculationCounts
    """Counters of the work done for it."""

    @classmethod
    async def resume(cls, request: GenerationRequest, tokenizer: Tokenizer, counts: SpeculationCounts) -> Generation:
        """Begin the answer with the request's `resume_ids`, in parts: a whole context at once would block all streams.

        Raises:
            InvalidArgumentError: the ids continue beyond the answer's end.
        """
        answer = Answer(request.stop_rules(tokenizer.special_names), tokenizer.detokenizer(request.prompt_ids))
        num_kept = 0
        for start in range(0, len(request.resume_ids), _RESUMED_AT_ONCE):
            num_kept += answer.append(request.resume_ids[start : start + _RESUMED_AT_ONCE]).num_tokens
            await asyncio.sleep(0)
        if num_kept < len(request.resume_ids):
            limit = f"must not go on beyond the answer's end at {num_kept}"
            raise InvalidArgumentError("resume_ids", f"{len(request.resume_ids)} ids", limit)
        return cls(request, answer, counts)

    def finished(self) -> Finished:
        """The last event; the answer has ended."""
        assert self.answer.finish is not None
        first_ns, received_ns = self.counts.first_token_ns, self.request.received_ns
        return Finished(
            reason=self.answer.finish,
            stop=self.answer.stop,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_output_tokens=len(self.answer.output_ids),
            num_cached_tokens=self.counts.num_cached_tokens,
            counts=self.counts,
            queue_ns=self.counts.queue_ns or 0,
            time_to_first_token_ns=max(0, first_ns - received_ns) if first_ns else 0,
            duration_ns=time.perf_counter_ns() - received_ns,
        )


class Placed(NamedTuple):
    """An admitted request with the verify worker that it starts on."""

    generation: Generation
    worker: VerifyWorker
