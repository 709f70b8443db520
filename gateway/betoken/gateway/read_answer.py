"""How tokens are given to a parser: special ones, which leave no text, as the marks that they are.

Uses only bytes of ids that were requested before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from betoken.client import Token
from betoken.common.tool_formats import MARKS, REASONING_MARKS
from betoken.gateway.tool_calls.parser import ToolCallParser

_MARK_BYTES = frozenset(mark.encode() for mark in MARKS)
_NUM_TAIL_IDS = max(map(len, REASONING_MARKS)) + 2  # a mark and two line ends, even if each byte is a token


def ids_to_read(prompt_ids: Sequence[int], tokens: Sequence[Token], has_tools: bool) -> set[int]:
    """Ids whose bytes a parser needs for these tokens."""
    return {*prompt_ids[-_NUM_TAIL_IDS:], *(token.id for token in tokens if has_tools or not token.text)}


def parser_of(
    prompt_ids: Sequence[int],
    names: Mapping[int, bytes],
    format_name: str,
    tools: Mapping[str, Any],
    *,
    begins_anew: bool = False,
) -> ToolCallParser:
    """Return the parser of the answer to a prompt, which may end within reasoning unless the answer `begins_anew`."""
    tail = b"".join(names.get(token_id, b"") for token_id in prompt_ids[-_NUM_TAIL_IDS:]).rstrip()
    marks = [] if begins_anew else [end for begin, end in REASONING_MARKS.items() if tail.endswith(begin.encode())]
    return ToolCallParser(format_name, tools, reasoning_end=marks[0] if marks else None)


class TokenText:
    """Text of an answer's tokens in order, special tokens included if they are marks.

    The router holds text back while a stop string or a character may be incomplete, and releases it with later tokens.
    A mark is inserted after the held text, where its token is.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, str]] = []
        """Marks to insert, each after a number of further characters."""

    def feed(self, token: Token, names: Mapping[int, bytes]) -> str:
        """Text that is final with `token`. `names` holds the bytes of its id if it is a special token."""
        name, text, inserted = names.get(token.id, b""), token.text, ""
        if name in _MARK_BYTES and not text.endswith(name.decode()):
            self._pending.append((token.num_held_chars or len(text), name.decode()))
        while self._pending and self._pending[0][0] <= len(text):
            num_before, mark = self._pending.pop(0)
            inserted += text[:num_before] + mark
            text = text[num_before:]
            self._pending = [(num - num_before, later) for num, later in self._pending]
        self._pending = [(num - len(text), later) for num, later in self._pending]
        return inserted + text
