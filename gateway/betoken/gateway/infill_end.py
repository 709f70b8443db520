"""Ends of answers that a gateway decides: indentation and time, as llama.cpp's server has them.

Neither changes a token: the answer is the beginning of what it would have been.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from betoken.client import AsyncClient, AsyncGeneration, Completion, Piece
from betoken.gateway.question import Question

_LINE = re.compile(r"\n([ \t]*)(?=[^ \t\n\r])")
"""Begin of a line that is not blank."""
_OPEN_LINE = re.compile(r"\n[ \t\r\n]*\Z")
"""Lines that may still turn out to be blank."""


@dataclass(frozen=True, slots=True)
class EndRules:
    """When an answer ends early."""

    min_indent: int = 0
    """Least indentation of each line after the first that is not blank, characters; 0 = any."""
    max_s: float = 0
    """Seconds from the first token; then the next line end ends the answer. 0 = no limit."""
    is_empty: bool = False
    """Whether only the prompt is to be computed."""

    def end_of(self, text: str) -> int | None:
        """Return the length of the text before a line with too little indentation; None without such a line."""
        for line in _LINE.finditer(text) if self.min_indent else ():
            if len(line[1]) < self.min_indent:
                return line.start() + 1
        return None

    def held(self, text: str) -> int:
        """Return the number of characters at the end whose line is not known to count yet."""
        match = _OPEN_LINE.search(text) if self.min_indent else None
        return 0 if match is None else len(text) - match.start() - 1


@dataclass(frozen=True, slots=True)
class InfillQuestion(Question):
    """A question whose answer may end early."""

    end: EndRules = field(default_factory=EndRules)

    def ask(self, client: AsyncClient, headers: Mapping[str, str]) -> AsyncGeneration:
        """The answer, still to be streamed."""
        generation = Question.ask(self, client, headers)
        return generation if self.end == EndRules() else cast(AsyncGeneration, EarlyEnd(generation, self.end))


class EarlyEnd:
    """An answer up to its early end, in place of the whole one."""

    def __init__(self, generation: AsyncGeneration, rules: EndRules) -> None:
        self._generation = generation
        self._rules = rules
        self._completion: Completion | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        rules, text, num_sent = self._rules, "", 0
        begin_s = first_s = time.monotonic()
        async with aclosing(aiter(self._generation)) as pieces:
            async for piece in pieces:
                if not text:
                    first_s = time.monotonic()
                text += piece.text
                end = 0 if rules.is_empty else rules.end_of(text)
                is_late = bool(rules.max_s) and "\n" in piece.text and time.monotonic() - first_s > rules.max_s
                if end is None and not is_late:
                    visible = len(text) - rules.held(text)
                    yield replace(piece, text=text[num_sent:visible])
                    num_sent = max(num_sent, visible)
                    continue
                text = text[:end]
                tokens = () if rules.is_empty else piece.tokens
                yield replace(piece, text=text[num_sent:], tokens=tokens)
                self._end(text, begin_s, first_s)
                return
        if num_sent < len(text):
            yield Piece(text[num_sent:], ())

    async def results(self) -> list[Completion]:
        """The answer."""
        if self._completion is None and self._generation.completed(0) is None:
            async for _ in self:
                pass
        return [cast(Completion, self.completed(0))]

    def completed(self, answer: int) -> Completion | None:
        """The answer, once it has ended."""
        return self._completion or self._generation.completed(answer)

    def _end(self, text: str, begin_s: float, first_s: float) -> None:
        so_far = cast(Completion, self._generation.so_far())
        if self._rules.is_empty:
            so_far = replace(so_far, tokens=())
        first_after_s, duration_s = first_s - begin_s, time.monotonic() - begin_s
        self._completion = replace(so_far, text=text, time_to_first_token_s=first_after_s, duration_s=duration_s)
