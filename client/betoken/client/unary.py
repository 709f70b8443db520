"""Calls with one answer: what is asked, how the answer is read, and each attempt's options.

Both clients share it and differ in how they wait; it does no input or output itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from betoken.client.channel import call_metadata
from betoken.client.completion import Detokenized
from betoken.client.config import PromptOptions
from betoken.client.model_info import ModelInfo
from betoken.client.request import ChatMessage, detokenize_request, tokenize_request
from betoken.client.retry import Retries
from betoken.common.errors import BetokenError
from betoken.common.trace import Span
from betoken.v1 import generation_pb2 as pb

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[AnswerT]):
    """A question to the router."""

    method: str
    """Name of the router's method."""
    request: Message
    read: Callable[[Any], AnswerT]
    """Makes what the caller gets of the router's answer."""


def model_info_call(wait: bool) -> UnaryCall[ModelInfo]:
    """Asks for the served model; with `wait` once a verify worker has been met."""
    return UnaryCall("GetModelInfo", pb.GetModelInfoRequest(at_once=not wait), ModelInfo.from_proto)


def tokenize_call(prompt: str | Sequence[ChatMessage], options: PromptOptions) -> UnaryCall[tuple[int, ...]]:
    """Asks for the ids of a prompt.

    Raises:
        InvalidArgumentError: a value no message can hold.
    """
    return UnaryCall("Tokenize", tokenize_request(prompt, options), lambda answer: tuple(answer.ids))


def detokenize_call(ids: Sequence[int]) -> UnaryCall[Detokenized]:
    """Asks for the text of ids.

    Raises:
        InvalidArgumentError: a value no message can hold.
    """
    return UnaryCall("Detokenize", detokenize_request(ids), Detokenized.from_proto)


class Attempts:
    """The attempts of one such call, within one span and one deadline."""

    def __init__(self, retries: Retries, span: Span, headers: Mapping[str, str]) -> None:
        self._retries = retries
        self._metadata = call_metadata(span, headers)

    def options(self) -> dict[str, Any]:
        """gRPC's options of the next attempt.

        Raises:
            DeadlineExceededError: no time is left.
        """
        return {"timeout": self._retries.remaining_s(), "metadata": self._metadata}

    def delay_after(self, error: BetokenError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            BetokenError: `error` itself, when it is final.
        """
        return self._retries.delay_after(error)
