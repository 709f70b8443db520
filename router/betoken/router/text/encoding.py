"""Text and chats as ids, within bounds of bytes and tokens, on threads if they are long.

A text far beyond the limit is refused before it is tokenized as a whole, which takes some 400 bytes of memory a token.
Knows the tokenizer, and which texts must not wait for which, but not requests or models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from betoken.common.errors import InvalidArgumentError
from betoken.router.text.chat import Chat
from betoken.router.text.tokenizer import Tokenizer, TokenizerFailedError
from betoken.rpc.validation import check_count

_LONG_TEXT_CHARS = 4096  # longer ones are tokenized on a thread: about a millisecond
_LARGE_TEXT_CHARS = 1 << 18  # a tenth of a second and more
_large_texts = ThreadPoolExecutor(2, "large-text")
"""Their own threads, so that no other request waits for them, be they refused in the end."""
_chats = ThreadPoolExecutor(4, "chat")
"""Threads for chats, whose templates may be slow."""
_PART_CHARS = 1 << 16
_USUAL_TOKEN_BYTES = 4  # a text of so many bytes for each token that fits is tokenized without a look at its parts
_PARTS_ALLOWANCE = 2  # parts of a text may have more tokens than the whole, which counts

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """How much text is taken."""

    max_bytes: int
    """UTF-8 of a prompt, or of all messages of a chat, and of what a template makes of them."""
    max_tokens: int
    """Ids that are of use to whoever asks; a text of a few more is still tokenized."""


async def encode_text(
    text: str, tokenizer: Tokenizer, limits: TextLimits, field: str = "prompt", *, add_special_tokens: bool = True
) -> Sequence[int]:
    """Ids of a prompt.

    Raises:
        InvalidArgumentError: it is too long, or the tokenizer fails at it.
    """
    check_count(field, utf8_bytes(text), 0, limits.max_bytes, "bytes")
    encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
    if len(text) <= _LONG_TEXT_CHARS:
        return _encode(text, tokenizer, limits, field, encode)
    return await on_text_thread(lambda: _encode(text, tokenizer, limits, field, encode), len(text))


async def encode_chat(chat: Chat, tokenizer: Tokenizer, limits: TextLimits, field: str = "messages") -> Sequence[int]:
    """Ids of a chat, rendered by the model's template.

    Raises:
        InvalidArgumentError: it is too long, or the template or the tokenizer refuses it.
    """
    check_count(field, chat.num_bytes, 0, limits.max_bytes, "bytes")

    def encode(text: str) -> Sequence[int]:
        plainly = partial(tokenizer.encode, add_special_tokens=False)
        return _encode(text, tokenizer, limits, field, tokenizer.escaping.encode if chat.escapes else plainly)

    def render() -> tuple[str, Sequence[int] | None]:
        given = replace(chat, messages=tokenizer.escaping.break_messages(chat.messages)) if chat.escapes else chat
        text = tokenizer.render(given)
        check_count(field, utf8_bytes(text), 0, limits.max_bytes, "bytes, rendered,")
        return text, encode(text) if len(text) <= _LONG_TEXT_CHARS else None

    text, ids = await asyncio.get_running_loop().run_in_executor(_chats, render)
    return ids if ids is not None else await on_text_thread(lambda: encode(text), len(text))


async def on_text_thread(work: Callable[[], Result], size: int) -> Result:
    """Run `work` on a thread; one of few if the text has more than a quarter of a million characters."""
    pool = _large_texts if size > _LARGE_TEXT_CHARS else None  # None = the loop's own
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def utf8_bytes(text: str) -> int:
    """Bytes of `text` in UTF-8; without a copy if it is ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _encode(
    text: str, tokenizer: Tokenizer, limits: TextLimits, field: str, encode: Callable[[str], Sequence[int]]
) -> Sequence[int]:
    try:
        _check_parts(text, tokenizer, limits, field)
        return encode(text)
    except TokenizerFailedError as error:
        raise InvalidArgumentError(field, f"{utf8_bytes(text)} bytes", str(error)) from error


def _check_parts(text: str, tokenizer: Tokenizer, limits: TextLimits, field: str) -> None:
    """Refuse a text whose parts have far more tokens than the limit; memory is needed for one part at a time."""
    num_bytes = utf8_bytes(text)
    if num_bytes <= max(_PART_CHARS, _USUAL_TOKEN_BYTES * limits.max_tokens):
        return
    num_tokens = 0
    for start in range(0, len(text), _PART_CHARS):
        num_tokens += len(tokenizer.encode(text[start : start + _PART_CHARS], add_special_tokens=False))
        if num_tokens > _PARTS_ALLOWANCE * limits.max_tokens:
            raise InvalidArgumentError(
                field, f"{num_bytes} bytes, {num_tokens} tokens and more", f"must be at most {limits.max_tokens} tokens"
            )
