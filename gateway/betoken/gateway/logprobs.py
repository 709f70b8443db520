"""Logprobs in OpenAI's two forms.

A token is identified by its bytes, which even half a character has. Knows no router: bytes of ids are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from betoken.client import Logprobs, Token

_LEAST = -9999.0
"""Value for the logarithm of 0, which JSON cannot represent; OpenAI's."""


def ids_of(tokens: Iterable[Token]) -> set[int]:
    """Every id whose bytes are needed to write the logprobs of `tokens`."""
    return {
        token_id
        for token in tokens
        if token.logprobs is not None
        for token_id in (token.id, *(top_id for top_id, _ in token.logprobs.top))
    }


def ids_of_prompt(prompt_ids: Sequence[int], logprobs: Iterable[Logprobs | None]) -> set[int]:
    """Every id whose bytes are needed to write the logprobs of a prompt."""
    return {*prompt_ids, *(top_id for one in logprobs if one is not None for top_id, _ in one.top)}


def chat_logprobs(tokens: Sequence[Token], bytes_of: Callable[[int], bytes]) -> dict[str, Any]:
    """`choice.logprobs` of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = bytes_of(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    content = [
        entry(token.id, token.logprobs.logprob) | {"top_logprobs": [entry(*pair) for pair in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """`choice.logprobs` of one text completion, whole or piece by piece."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._offset = 0
        """Code points of the choice's text before the next token."""

    def of_prompt(self, text: str, ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Logprobs of the prompt that the choice begins with; the first token has none. `logprobs`: one per id."""
        self._offset = len(text)
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": [one and max(one.logprob, _LEAST) for one in logprobs],
            "top_logprobs": [one and self._top(token_id, one) for token_id, one in zip(ids, logprobs, strict=True)],
            "text_offset": prompt_offsets(text, [self._bytes_of(token_id) for token_id in ids]),
        }

    def of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Logprobs of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        known = [token.logprobs for token in tokens if token.logprobs is not None]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [max(logprobs.logprob, _LEAST) for logprobs in known],
            "top_logprobs": [self._top(token.id, own) for token, own in zip(tokens, known, strict=False)],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, own: Logprobs) -> dict[str, float]:
        """The likeliest tokens, and the token itself."""
        pairs = ((token_id, own.logprob), *own.top)
        return {self._name(top_id): max(logprob, _LEAST) for top_id, logprob in pairs}

    def _name(self, token_id: int) -> str:
        """Its text; OpenAI's `bytes:\\xe2\\x82` if it is not text, so that two tokens never share a name."""
        data = self._bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Code points of the text before each token, given the bytes of each; within a character, those before that.

    A special token may have no text, and the first token a space that the text lacks. A text of ids has U+FFFD where
    their bytes are not text.
    """
    data = text.encode("utf-8", "surrogatepass")
    offsets, place, num_begun = [], 0, 0
    for piece in pieces:
        is_within = place < len(data) and data[place] & 0xC0 == 0x80
        offsets.append(num_begun - is_within)
        end = place + _num_bytes(data, place, piece)
        num_begun += sum(byte & 0xC0 != 0x80 for byte in data[place:end])
        place = end
    return offsets


def _num_bytes(data: bytes, place: int, piece: bytes) -> int:
    """How many bytes of the text are a token's."""
    if data.startswith(piece, place):
        return len(piece)
    if place == 0 and piece.startswith(b" ") and data.startswith(piece[1:]):
        return len(piece) - 1
    told = piece.decode("utf-8", "replace").encode()
    return len(told) if told != piece and data.startswith(told, place) else 0


def joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Logprobs of a text completion that follow each other, as one."""
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
