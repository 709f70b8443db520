"""The characters that a model's tokens can make, for stop strings that no answer could hold.

Knows vocabulary and decoder; what a model is likely to say is not its matter.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from betoken.rpc.token_bytes import BYTE_LETTERS, decoder_kinds

_DECODERS_OWN = " \ufffd"


class Alphabet:
    """Characters of a tokenizer's texts."""

    def __init__(self, fast: Tokenizer, tokenizer_json: str) -> None:
        """`tokenizer_json` is the text that `fast` was read from."""
        vocab = fast.get_vocab()
        kinds = decoder_kinds(json.loads(tokenizer_json).get("decoder"))
        self._bytes: set[int] = set()
        """Bytes that tokens stand for: any character of these may come about."""
        if "ByteLevel" in kinds:
            self._bytes |= {BYTE_LETTERS[letter] for letter in set().union(*vocab) if letter in BYTE_LETTERS}
        if "ByteFallback" in kinds:
            self._bytes |= {byte for byte in range(256) if f"<0x{byte:02X}>" in vocab}
        self._characters: frozenset[str] = frozenset()
        """Characters of single tokens; empty if there is a token for each byte."""
        if len(self._bytes) < len(BYTE_LETTERS):
            shown = fast.decode_batch([[token_id] for token_id in vocab.values()], skip_special_tokens=False)
            self._characters = frozenset(_DECODERS_OWN).union(*vocab, *shown)

    def absent(self, text: str) -> list[str]:
        """The characters of `text` that no tokens make, in their order."""
        if len(self._bytes) == len(BYTE_LETTERS):
            return []
        return [char for char in text if char not in self._characters and not self._bytes.issuperset(char.encode())]
