"""The tokens of one tokenizer as bytes, and texts of any bytes as its ids. Knows no model and no other tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from betoken.rpc.plain_tokenizer import plain_tokenizer
from betoken.rpc.token_bytes import TokenBytes

MAX_TOKENS = 1 << 22
"""Largest vocabulary, ids."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONE_BYTES = re.compile("[\udc80-\udcff]")
_PROBE = "a"


class TokenizerFaultError(ValueError):
    """The text is not a tokenizer, or its library fails at an input."""


class Vocabulary:
    """Tokens of a tokenizer.json."""

    def __init__(self, tokenizer_json: str) -> None:
        """Raises:
        TokenizerFaultError: the text is not a tokenizer, or has more than `MAX_TOKENS` ids.
        """
        try:
            self._fast = plain_tokenizer(tokenizer_json)
            token_bytes = TokenBytes(self._fast, tokenizer_json)
            added = self._fast.get_added_tokens_decoder()
            size = 1 + max((*self._fast.get_vocab().values(), *added), default=-1)
            if not 0 < size <= MAX_TOKENS:
                raise TokenizerFaultError(f"{size} ids: must be 1 to {MAX_TOKENS}")
            self.token_bytes: list[bytes] = [token_bytes(token_id) for token_id in range(size)]
            """Bytes that each id stands for; of special tokens their names, of unused ids none."""
            names = {token_id: self._fast.id_to_token(token_id) or "" for token_id in range(size)}
        except BaseException as error:
            raise _fault(error) from error
        self.size = size
        """Number of ids, without padding of an output layer."""
        self.special_names = {token_id: token.content for token_id, token in added.items() if token.special}
        """Names of the tokens that leave no text, by id."""
        self.ids_of_bytes = self._text_tokens(names)
        """Ids of tokens that leave text, by their bytes. Of tokens with equal bytes the first that is not `<0x..>`."""
        self.beginning = self._beginning()
        """Ids that the tokenizer puts before a text, such as BOS."""

    def encode(self, text: bytes) -> list[int]:
        """Return ids of a piece of text. Bytes that are not UTF-8 become tokens of single bytes; those without a token
        are left out.

        Raises:
            TokenizerFaultError: the tokenizer fails at the text.
        """
        ids: list[int] = []
        decoded = text.decode("utf-8", errors="surrogateescape")
        start = 0
        for match in _LONE_BYTES.finditer(decoded):
            ids += self._encode_valid(decoded[start : match.start()])
            lone = self.ids_of_bytes.get(bytes([ord(match[0]) - 0xDC00]))
            ids += [] if lone is None else [lone]
            start = match.end()
        return ids + self._encode_valid(decoded[start:])

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ids below `size`."""
        return b"".join([self.token_bytes[token_id] for token_id in ids])

    def reproduces(self, text: bytes) -> bool:
        """Whether the ids of a text stand for that text.

        Raises:
            TokenizerFaultError: the tokenizer fails at the text.
        """
        return self.decode(self.encode(text)) == text

    def _encode_valid(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            # A batch releases the interpreter lock; `encode` would stop the event loop of the worker meanwhile.
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            raise _fault(error) from error
        ids: list[int] = encoding.ids
        return ids

    def _text_tokens(self, names: dict[int, str]) -> dict[bytes, int]:
        texts = [token_id for token_id in range(self.size) if token_id not in self.special_names]
        texts.sort(key=lambda token_id: _BYTE_TOKEN.fullmatch(names[token_id]) is not None)
        ids: dict[bytes, int] = {}
        for token_id in texts:
            if token := self.token_bytes[token_id]:
                ids.setdefault(token, token_id)
        return ids

    def _beginning(self) -> list[int]:
        try:
            encoding = self._fast.encode(_PROBE, add_special_tokens=True)
        except BaseException as error:
            raise _fault(error) from error
        masks = encoding.special_tokens_mask
        num_first = masks.index(0) if 0 in masks else 0
        ids: list[int] = encoding.ids[:num_first]
        return ids


def incomplete_suffix(text: bytes) -> int:
    """Return the number of bytes at the end that begin a character without completing it."""
    for num_bytes in range(1, min(4, len(text) + 1)):
        lead = text[-num_bytes]
        if lead & 0xC0 != 0x80:
            length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return num_bytes if length > num_bytes else 0
    return 0


def _fault(error: BaseException) -> BaseException:
    """The error to raise in place of the library's, whose panics do not derive from `Exception`; others stay."""
    if isinstance(error, KeyboardInterrupt | SystemExit | TokenizerFaultError):
        return error
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return TokenizerFaultError(words[:200])
