"""Prompts with a gap on their way through the router: ids within the context, end ids and predicted ids.

Knows the tokenizer's format, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from betoken.common.errors import InvalidArgumentError
from betoken.router.text.encoding import TextLimits, on_text_thread, utf8_bytes
from betoken.router.text.infill import InfillFormat
from betoken.router.text.tokenizer import Tokenizer, TokenizerFailedError
from betoken.rpc.validation import check_count
from betoken.v1.generation_pb2 import Infill

_MAX_TOKEN_CHARS = 8
"""Characters of a text that are tokenized for each token of the context: texts have fewer in a token."""


async def encode_infill(given: Infill, tokenizer: Tokenizer, limits: TextLimits, num_new_tokens: int) -> Sequence[int]:
    """Return the ids of a gap, cut so that `num_new_tokens` fit after them.

    Raises:
        InvalidArgumentError: the model's tokenizer has no tokens for a gap, the texts are too long, or the tokenizer
            fails.
    """
    infill = tokenizer.infill
    if infill is None:
        limit = "must be absent: the model's tokenizer has no fill-in-the-middle tokens"
        raise InvalidArgumentError("infill", "set", limit)
    texts = (given.prefix, given.suffix, *(file.text for file in given.files))
    num_bytes = sum(map(utf8_bytes, texts))
    check_count("infill", num_bytes, 0, limits.max_bytes, "bytes")
    room, found = limits.max_tokens - num_new_tokens, infill
    cut = _cut(given, _MAX_TOKEN_CHARS * limits.max_tokens)

    def encode() -> Sequence[int]:
        bos_ids = [token_id for token_id in tokenizer.encode("")[:1] if token_id == tokenizer.bos_id]
        encode_joined = partial(tokenizer.encode_plain, is_joined=True)
        return found.prompt(cut, tokenizer.encode_plain, encode_joined, bos_ids, room)

    try:
        return await on_text_thread(encode, num_bytes)
    except TokenizerFailedError as error:
        raise InvalidArgumentError("infill", f"{num_bytes} bytes", str(error)) from error
    except InvalidArgumentError as error:  # of special tokens that cannot be escaped
        raise InvalidArgumentError("infill", "set", error.limit) from error


def with_infill_ends(
    eos_token_ids: tuple[int, ...], tokenizer: Tokenizer, prompt_ids: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """Return the ids that end an answer; for a prompt with a gap, EOS and the ids of the format."""
    if (infill := _of(tokenizer, prompt_ids)) is None:
        return eos_token_ids
    return tuple(dict.fromkeys((*eos_token_ids, *(end for end in infill.end_ids if end < vocab_size))))


def predicted_of_infill(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Sequence[int]:
    """Return the ids that an answer is expected to repeat; empty for a prompt without a gap."""
    infill = _of(tokenizer, prompt_ids)
    return () if infill is None else infill.predicted(prompt_ids)


def _of(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> InfillFormat | None:
    """Format of the gap in a prompt. The ids alone decide, so that a resumed answer ends like the first one."""
    infill = tokenizer.infill
    return infill if infill is not None and infill.is_in(prompt_ids) else None


def _cut(given: Infill, max_chars: int) -> Infill:
    """A gap without text that cannot fit, so that a text far beyond the context is not tokenized."""
    cut = Infill(prefix=given.prefix[-max_chars:], suffix=given.suffix[:max_chars])
    num_chars, files = 0, []
    for file in reversed(given.files):
        num_chars += len(file.text)
        if num_chars > max_chars:
            break
        files.append(file)
    cut.files.extend(reversed(files))
    return cut
