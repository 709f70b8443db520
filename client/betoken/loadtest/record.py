"""One request of a load test: its body, and what is measured of its response.

Times are seconds since the request's arrival, which in an open loop is the scheduled one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from betoken.loadtest.acceptance import Acceptance, of_event
from betoken.loadtest.endpoint import Endpoint, RequestFailedError
from betoken.loadtest.prompts import Prompt


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields of each request."""

    model: str
    max_tokens: int
    is_chat: bool | None = None
    """Whether prompts are sent as chats; None = prompts of conversations only."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields: temperature, seed, ..."""

    def request(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        """Return path and body of the request for a prompt."""
        is_chat = prompt.is_chat if self.is_chat is None else self.is_chat
        text = {"messages": [{"role": "user", "content": prompt.text}]} if is_chat else {"prompt": prompt.text}
        options = {"model": self.model, "max_tokens": self.max_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return "/v1/chat/completions" if is_chat else "/v1/completions", text | options | stream | dict(self.fields)


@dataclass(slots=True)
class Record:
    """Measurements of one request."""

    prompt: Prompt
    arrival_s: float = 0.0
    """Since the begin of the run."""
    chunk_s: list[float] = field(default_factory=list)
    """Arrivals of the chunks with text."""
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """As the server counts them; else the number of chunks."""
    error: str = ""
    """Why it failed; empty if it did not."""
    acceptance: Acceptance | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """Times of the rounds, if the server reports them."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.chunk_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None without a second."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks: inter-token latency, with a chunk of several tokens counted once."""
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]


def ask(endpoint: Endpoint, options: RequestOptions, record: Record, begin: float) -> None:
    """Send the request of a record and fill the record in; `begin`: `time.perf_counter()` of its arrival."""
    path, body = options.request(record.prompt)
    try:
        _read(endpoint.stream(path, body), record, begin)
    except RequestFailedError as error:
        record.error = str(error)
    except (AttributeError, TypeError, ValueError):
        record.error = "an event does not follow OpenAI's protocol"
    record.end_s = time.perf_counter() - begin
    if not record.error and not record.chunk_s:
        record.error = "no text"


def _read(events: Iterable[tuple[float, dict[str, Any]]], record: Record, begin: float) -> None:
    for now, event in events:
        for choice in event.get("choices") or ():
            if _has_text(choice):
                record.chunk_s.append(now - begin)
            record.rounds += (choice.get("betoken") or {}).get("rounds") or ()
        if usage := event.get("usage"):
            record.num_prompt_tokens = usage.get("prompt_tokens") or 0
            record.num_output_tokens = usage.get("completion_tokens") or 0
        record.acceptance = of_event(event) or record.acceptance
    record.num_output_tokens = record.num_output_tokens or len(record.chunk_s)


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), *(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")))
    return any(parts)
