"""Options of `tokenizer_config.json` for single tokens: additions to `tokenizer.json`, and their names in templates.

It knows that file's fields as transformers reads them, and the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may have, in the order in which they are added."""


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by their names (`bos_token`, ...), which templates use as variables."""
    return {name: token.content for name, token in _named(config).items()}


def add_tokens(fast: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add to `fast`, read from `tokenizer.json`, what only this file has, and take over what it says otherwise.

    Raises:
        Exception: a description of a token is none; of any type.
    """
    known = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    described = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda entry: int(entry[0]))
    wanted = {token.content: token for token in (_token(description) for _, description in described)}
    for token in _named(config).values():
        wanted.setdefault(token.content, known.get(token.content, token)).special = True
    for token in _unnamed(config):
        if token.content not in known:
            wanted.setdefault(token.content, token)
    fast.add_tokens(list(wanted.values()))  # ids in this order
    fast.encode_special_tokens = bool(config.get("split_special_tokens"))  # their names in a text are text


def _named(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    extra = config.get("extra_special_tokens")
    given = [*config.items(), *(extra.items() if isinstance(extra, Mapping) else ())]
    tokens = {name: _token(value) for name, value in given if name.endswith("_token") and _is_token(value)}
    return {name: tokens[name] for name in [*filter(tokens.__contains__, _NAMES), *tokens]}


def _unnamed(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    for field in ("extra_special_tokens", "additional_special_tokens"):  # the second is what it was called before
        if isinstance(given := config.get(field), list) and given:
            return map(_token, filter(_is_token, given))
    return iter(())


def _is_token(value: Any) -> bool:
    return isinstance(value["content"] if isinstance(value, Mapping) and "content" in value else value, str)


def _token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    return AddedToken(**{name: given for name, given in value.items() if name != "__type"})
