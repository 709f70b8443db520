"""Logprobs of prompts, from the prefill rows of a forward: the row of a token scores the next token.

Each position is sent once, even if its row is recomputed. Knows no scheduling and no links.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.engine.sampler import TokenLogprob, logprobs_of_tokens
from betoken.rpc.link.worker_load import SequenceKey
from betoken.verify_worker.scheduler import Work


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Logprobs of consecutive prompt tokens of one sequence."""

    key: SequenceKey
    first_position: int
    logprobs: list[TokenLogprob]

    @property
    def is_sound(self) -> bool:
        """Whether all are numbers: logits that hold NaN give none."""
        return not any(math.isnan(one.logprob) for one in self.logprobs)


def prompt_logprobs_of(logits: Tensor, planned: Sequence[Work]) -> list[PromptPart]:
    """The logprobs of all prompt tokens scored by a forward's logits [L, V]; marks them as sent."""
    parts: list[PromptPart] = []
    for work, start in _with_starts(planned):
        if work.num_sent:
            seq, first = work.sequence, work.sequence.next_to_send
            token_ids = seq.prompt_ids[first : first + work.num_sent]
            rows = logits[start : start + len(token_ids)]
            logprobs = logprobs_of_tokens(rows, token_ids, seq.opened.num_prompt_logprobs or 0)
            parts.append(PromptPart(seq.key, first, logprobs))
            seq.next_to_send += len(token_ids)
    return parts


def block_logits(logits: Tensor, planned: Sequence[Work]) -> Tensor:
    """The rows of blocks among a forward's logits."""
    if not any(work.num_sent for work in planned):
        return logits
    rows = [
        row
        for work, start in _with_starts(planned)
        if work.takes_block
        for row in range(start + work.num_sent, start + work.num_logits)
    ]
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


def _with_starts(planned: Sequence[Work]) -> Iterator[tuple[Work, int]]:
    """Each sequence's work and the first of its rows of logits."""
    start = 0
    for work in planned:
        yield work, start
        start += work.num_logits
