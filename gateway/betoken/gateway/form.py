"""How answers are written down: what all endpoints of OpenAI's have in common, whole or in events.

A form is asked for the parts of one reply; it does not send.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from betoken.client import AsyncGeneration, Completion, Piece, Token
from betoken.gateway.body import Extension, GenerationBody
from betoken.gateway.logprobs import ids_of
from betoken.gateway.speculative_metrics import Level, response_metrics


class Form(ABC):
    """One reply being written."""

    kind: ClassVar[str]
    """`object` of a whole answer."""
    event_kind: ClassVar[str] = ""
    """`object` of an event, if it differs."""
    prefix: ClassVar[str]
    """Prefix of the reply's id."""
    names_events: ClassVar[bool] = False
    """Whether events are named by their type, and end without [DONE]."""
    echoes: bool = False
    """Whether answers begin with their prompts."""

    def __init__(self, body: GenerationBody, request_id: str) -> None:
        self.include_usage = body.include_usage
        self.names: Mapping[int, bytes] = {}
        """Bytes of the ids with reported logprobs, set in advance."""
        self.prompts: Sequence[str] = ()
        """The prompts' texts, if echoed."""
        self.names_of_model: Callable[[str], Sequence[str]] = lambda model: (model,)
        """Names of the router's model id, the shown one first."""
        self.spec_decode_metrics: Level = "none"
        """Detail of `metrics.speculative_decoding`."""
        self._id = f"{self.prefix}-{request_id}"
        self._created = int(time.time())

    @property
    @abstractmethod
    def num_choices(self) -> int:
        """How many answers there are."""

    @abstractmethod
    def prompt_index(self, index: int) -> int:
        """Which prompt choice `index` answers."""

    @abstractmethod
    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def opening(self, index: int, asked: AsyncGeneration, seed: int | None) -> dict[str, Any] | None:
        """The events before the first piece."""

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece; None without an event."""

    @abstractmethod
    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        """The events after the last piece."""

    def ids_needed(self, prompt_ids: Sequence[int], tokens: Sequence[Token]) -> set[int]:
        """Ids whose bytes have to be in `names` before these tokens are written."""
        return ids_of(tokens)

    def ids_of_prompt(self, asked: AsyncGeneration) -> set[int]:
        """Ids whose bytes have to be in `names` before a choice begins; of the logprobs of its prompt."""
        return set()

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one id."""
        return self.names[token_id]

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The reply in one."""
        head = self._head(self.kind, answers[0].model, answers[0].system_fingerprint)
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return head | {"choices": choices, "usage": self.usage(answers)} | self._metrics(answers)

    def event(self, asked: AsyncGeneration, choice: dict[str, Any]) -> dict[str, Any]:
        """A reply in events: one of them."""
        event = self._head(self.event_kind or self.kind, asked.model, asked.system_fingerprint)
        event["choices"] = [choice]
        if self.include_usage:
            event["usage"] = None
        return event

    def events(self, asked: AsyncGeneration, choice: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """The events of `opening`, `delta` or `ending`."""
        return (self.event(asked, choice),)

    def last_event(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The events with the usage of a reply."""
        head = self._head(self.event_kind or self.kind, answers[0].model, answers[0].system_fingerprint)
        return head | {"choices": [], "usage": self.usage(answers)} | self._metrics(answers)

    def usage(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """Token counts; a prompt that is answered several times counts once."""
        first = {self.prompt_index(index): answer.usage for index, answer in reversed(list(enumerate(answers)))}
        prompt = sum(usage.prompt_tokens for usage in first.values())
        output = sum(answer.usage.output_tokens for answer in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(one.speculation.num_accepted_prediction_tokens for one in answers),
                "rejected_prediction_tokens": sum(one.speculation.num_rejected_prediction_tokens for one in answers),
            },
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_prompt_tokens for usage in first.values())},
        }

    def _metrics(self, answers: Sequence[Completion]) -> dict[str, Any]:
        return response_metrics(answers, self.spec_decode_metrics)

    def _head(self, kind: str, model: str, fingerprint: str) -> dict[str, Any]:
        name = self.names_of_model(model)[0]
        head = {"id": self._id, "object": kind, "created": self._created, "model": name}
        return head | {"system_fingerprint": fingerprint}


def choice_extension(answer: Completion, has_tokens: bool) -> dict[str, Any]:
    """`choice.betoken` of a whole answer: its seed, and what speculation did."""
    stats = answer.speculation
    told: dict[str, Any] = {
        "seed": answer.seed,
        "request_id": answer.request_id,
        "drafter": answer.drafter,
        "mode": str(answer.mode),
        "stop": answer.stop,
        "num_resumes": answer.num_resumes,
        "queue_s": answer.queue_s,
        "time_to_first_token_s": answer.time_to_first_token_s,
        "duration_s": answer.duration_s,
        "speculation": dataclasses.asdict(stats)
        | {"acceptance_rate": stats.acceptance_rate, "block_efficiency": stats.block_efficiency},
    }
    return told | {"tokens": tokens_extension(answer.tokens)} if has_tokens else told


def piece_extension(piece: Piece, asked: Extension) -> dict[str, Any]:
    """`choice.betoken` of an event: reports on its tokens."""
    told: dict[str, Any] = {}
    if asked.provenance and piece.tokens:
        told["tokens"] = tokens_extension(piece.tokens)
    if asked.rounds and piece.rounds:
        told["rounds"] = [dataclasses.asdict(times) for times in piece.rounds]
    return told


def tokens_extension(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Each token with its source."""
    return [
        {"id": token.id, "text": token.text, "origin": str(token.origin), "source": token.source and str(token.source)}
        for token in tokens
    ]
