"""The bytes that one token stands for, whatever its neighbours: what text of single tokens and logprobs are shown by.

Knows the three ways in which tokenizers write bytes: as letters of GPT-2's table, as `<0xE2>`, as text with a mark for
the space. Half a character is bytes too, where decoding would show a replacement.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_LETTERS = _byte_of_letter()
"""Bytes by the letters that stand for them."""


class TokenBytes:
    """Bytes by id."""

    def __init__(self, fast: Tokenizer, tokenizer_json: str) -> None:
        """`tokenizer_json` is the text that `fast` was read from."""
        self._fast = fast
        kinds = decoder_kinds(json.loads(tokenizer_json).get("decoder"))
        self._is_byte_level = "ByteLevel" in kinds
        self._has_bytes = "ByteFallback" in kinds
        self._added = {index: token.content for index, token in fast.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Bytes of one id; none for an id that the tokenizer lacks, as padding of the output layer is."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def _find(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(letter in BYTE_LETTERS for letter in token):
            return bytes(BYTE_LETTERS[letter] for letter in token)
        if self._has_bytes and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace(_SPACE, " ") if _SPACE in token else self._text(token_id, token)).encode()

    def _text(self, token_id: int, token: str) -> str:
        """The decoder's text for the token alone, or the token itself if that is empty."""
        text: str = self._fast.decode([token_id], skip_special_tokens=False)
        return text or token


def decoder_kinds(decoder: Any) -> set[str]:
    """Types of a decoder and of its parts."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(decoder_kinds, decoder.get("decoders") or ()))
