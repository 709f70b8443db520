"""How tokens are given to a reader: special ones, which leave no text, as the marks that they are.

Knows bytes of ids only where they were asked for before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from betoken.client import Token
from betoken.gateway.reader import MARKS, THINK, Reader

_MARK_BYTES = frozenset(mark.encode() for mark in MARKS)
_NUM_TAIL_IDS = len(THINK) + 2  # of a prompt, within which `<think>` and two line ends fit, be each byte a token


def ids_to_read(prompt_ids: Sequence[int], tokens: Sequence[Token], has_tools: bool) -> set[int]:
    """Ids whose bytes a reader needs for these tokens."""
    return {*prompt_ids[-_NUM_TAIL_IDS:], *(token.id for token in tokens if has_tools or not token.text)}


def reader_of(
    prompt_ids: Sequence[int], names: Mapping[int, bytes], tools: Set[str], *, begins_anew: bool = False
) -> Reader:
    """A reader of the answer to this prompt, which may end within a thought; not of one that `begins_anew`."""
    tail = b"".join(names.get(token_id, b"") for token_id in prompt_ids[-_NUM_TAIL_IDS:])
    return Reader(tools, is_thinking=not begins_anew and tail.rstrip().endswith(THINK.encode()))


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
