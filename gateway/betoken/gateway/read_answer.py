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


def text_of(token: Token, names: Mapping[int, bytes]) -> str:
    """Its text, and the mark that it is, if any."""
    name = names.get(token.id, b"")
    is_mark = name in _MARK_BYTES and not token.text.endswith(name.decode())
    return token.text + name.decode() if is_mark else token.text
