"""Logprobs in OpenAI's two forms.

A token is told by its own bytes, which half a character has too. Knows no router: bytes of ids are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from betoken.client import Token


def ids_of(tokens: Iterable[Token]) -> set[int]:
    """Every id whose bytes are needed to write the logprobs of `tokens`."""
    return {
        token_id
        for token in tokens
        if token.logprobs is not None
        for token_id in (token.id, *(top_id for top_id, _ in token.logprobs.top))
    }


def chat_logprobs(tokens: Sequence[Token], bytes_of: Callable[[int], bytes]) -> dict[str, Any]:
    """`choice.logprobs` of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = bytes_of(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

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
        """Code points of the answer before the next token."""

    def of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Logprobs of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        known = [token.logprobs for token in tokens if token.logprobs is not None]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [logprobs.logprob for logprobs in known],
            "top_logprobs": [
                {self._name(token_id): logprob for token_id, logprob in ((token.id, own.logprob), *own.top)}
                for token, own in zip(tokens, known, strict=False)
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """Its text; OpenAI's `bytes:\\xe2\\x82` where that is none, so that two tokens never share a name."""
        data = self._bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
