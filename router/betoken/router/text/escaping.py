"""Chats in which a special token's name in a message is text, and in the template the token.

Special tokens spelt by a message are broken by a mark before rendering; the template's own are kept. A second tokenizer
knows added tokens by their marks only. It does not know what a template makes of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from betoken.common.errors import InvalidArgumentError

_SPELLED, _WRITTEN = "\ufdd0", "\ufdd1"  # noncharacters: in no text that means anything


@dataclass(frozen=True, slots=True)
class EscapingTokenizer:
    """A tokenizer for chats whose messages must not spell special tokens."""

    _fast: FastTokenizer
    _added: re.Pattern[str]
    """Names of added tokens, of two that begin alike the longer."""
    _ids: Mapping[int, int]
    """Ids of the marked tokens here -> the model's own."""

    @classmethod
    def of(cls, fast: FastTokenizer) -> EscapingTokenizer:
        """Made of the model's tokenizer.

        Raises:
            InvalidArgumentError: the tokenizer's ids leave no room for marked tokens.
        """
        data = json.loads(fast.to_str())
        added, data["added_tokens"] = data["added_tokens"], []
        _mark(data["model"], {token["content"]: token["id"] for token in added})
        marked = FastTokenizer.from_str(json.dumps(data))
        taken = set(marked.get_vocab().values())
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        marked.add_tokens([AddedToken(_WRITTEN + t["content"], **{name: t[name] for name in flags}) for t in added])
        names = sorted((token["content"] for token in added), key=len, reverse=True)
        known = marked.get_vocab()
        ids = {known[_WRITTEN + token["content"]]: token["id"] for token in added}
        if any(ours != theirs and ours in taken for ours, theirs in ids.items()):
            raise _cannot_escape()
        return cls(marked, re.compile("|".join(map(re.escape, names)) or "(?!)"), ids)

    def break_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, the names of added tokens in them broken by a mark.

        Raises:
            InvalidArgumentError: a message holds a mark.
        """
        return [{field: self._broken(value) for field, value in message.items()} for message in messages]

    def encode(self, rendered: str) -> list[int]:
        """Ids of a chat that was rendered of broken messages.

        Raises:
            InvalidArgumentError: the tokenizer treats the name as the token at any position.
        """
        text, num_written = self._added.subn(lambda name: _WRITTEN + name[0], rendered)
        (encoding,) = self._fast.encode_batch_fast([text.replace(_SPELLED, "")], add_special_tokens=False)
        own, ids = set(self._ids.values()), [self._ids.get(token_id, token_id) for token_id in encoding.ids]
        if sum(token_id in own for token_id in ids) != num_written:
            raise _cannot_escape()
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which every name of a special token is text."""
        # A mark in front of a name would spell the token, so that no part holds both.
        parts = [part for part in re.split(f"({_WRITTEN})", text) if part]
        return [i for part in self._fast.encode_batch_fast(parts, add_special_tokens=False) for i in part.ids]

    def _broken(self, value: Any) -> Any:
        """It covers texts within lists and objects too, such as calls of tools."""
        if isinstance(value, dict):
            return {key: self._broken(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._broken(part) for part in value]
        return self._broken_text(value) if isinstance(value, str) else value

    def _broken_text(self, text: str) -> str:
        if _SPELLED in text or _WRITTEN in text:
            limit = "must hold neither where escape_special_tokens is set"
            raise InvalidArgumentError("messages", "U+FDD0 or U+FDD1", limit)
        return self._added.sub(lambda name: name[0][:1] + _SPELLED + name[0][1:], text)


def _mark(model: dict[str, Any], added: Mapping[str, int]) -> None:
    """Register added tokens in the vocabulary by marked names, if possible; the plain names then match nothing."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # [name, score] by position
        for name, token_id in added.items():
            if token_id < len(vocab) and vocab[token_id][0] == name:
                vocab[token_id][0] = _WRITTEN + name
    elif isinstance(vocab, dict):
        pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model.get("merges") or ()]
        needed = {model.get("unk_token"), *map("".join, pairs), *(part for pair in pairs for part in pair)}
        for name, token_id in added.items():
            if name in vocab and name not in needed:
                del vocab[name]
            vocab[_WRITTEN + name] = token_id


def _cannot_escape() -> InvalidArgumentError:
    limit = "must be absent: this model's tokenizer cannot distinguish a special token's name from the token"
    return InvalidArgumentError("messages.escape_special_tokens", True, limit)
