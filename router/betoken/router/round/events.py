"""Events of a request's stream: that it began, the prompt's logprobs, the tokens of its rounds, that it ended.

Knows no gRPC and no worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from betoken.router.request.generation import GenerationRequest
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.answer import FinishReason
from betoken.v1.generation_pb2 import RoundTimes
from betoken.v1.types_pb2 import TokenLogprobs, TokenOrigin


@dataclass(frozen=True, slots=True)
class Started:
    """First event."""

    request: GenerationRequest
    drafter: str = ""
    """Drafter at the start; empty = none."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsPart:
    """Logprobs of consecutive prompt tokens."""

    first_position: int
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class EmittedRound:
    """Tokens of one verification result, as far as the answer keeps them."""

    ids: Sequence[int]
    origins: Sequence[TokenOrigin]
    """Why each id is in the answer."""
    sources: Sequence[str]
    """Name of the drafter of each id; empty = the target's own."""
    logprobs: Sequence[TokenLogprobs]
    """One per id when asked for, else empty."""
    text: str
    """Text that became final with the round."""
    num_chars: Sequence[int]
    """Characters of `text` that became final with each id."""
    times: RoundTimes | None = None
    """Times of the round, if requested."""
    num_held_chars: Sequence[int] = ()
    """Characters held back before each special token; empty if none were."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rounds whose tokens leave together."""

    rounds: Sequence[EmittedRound]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rounds."""
        return sum(len(one.ids) for one in self.rounds)


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event."""

    reason: FinishReason
    stop: str
    num_prompt_tokens: int
    num_output_tokens: int
    """Resumed ones included."""
    num_cached_tokens: int
    counts: SpeculationCounts
    queue_ns: int
    time_to_first_token_ns: int
    duration_ns: int


Event: TypeAlias = Started | PromptLogprobsPart | Tokens | Finished
Emit: TypeAlias = Callable[[Event], Awaitable[None]]
