"""The ids, merges and added tokens of a tokenizer.json: their hash, and the first difference of two.

Normalisers and templates are not compared.
"""

import hashlib
import json
import os
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from betoken.common.gguf import find_gguf, read_header, read_tokenizer

_FILE = "tokenizer.json"


def canonical_tokenizer(text: str) -> dict[str, list[Any]]:
    """Vocabulary, merges and added tokens of a tokenizer.json's text, in canonical order."""
    data = json.loads(text)
    model = data["model"]
    vocab = model.get("vocab", {})
    return {
        # BPE, WordPiece, WordLevel: token -> id; Unigram: [token, score] by position.
        "vocab": sorted(([token, index] for token, index in vocab.items()), key=lambda entry: (entry[1], entry[0]))
        if isinstance(vocab, dict)
        else [entry[0] for entry in vocab],
        # Older files write "a b", newer ones ["a", "b"].
        "merges": [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model.get("merges") or []],
        "added_tokens": sorted([token["id"], token["content"]] for token in data.get("added_tokens") or []),
    }


def hash_tokenizer_json(text: str) -> str:
    """SHA-256 hex of the canonical vocabulary, merges and added tokens of a `tokenizer.json`'s text.

    Router and workers compare it. Normalisers and templates do not enter; ids and merges do.
    """
    encoded = json.dumps(canonical_tokenizer(text), ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(encoded.encode()).hexdigest()


def tokenizer_difference(first: str, second: str) -> str:
    """How two models' tokenizers differ: sizes and the first difference; empty if they are equal.

    Args:
        first: directory or GGUF file of a model. A hub id, or a model without a readable tokenizer, differs from none.
        second: the other model, in the same form.
    """
    try:
        texts = [tokenizer_text(name) for name in (first, second)]
    except (OSError, ValueError):  # the load reports why
        return ""
    return "" if None in texts else text_difference(*cast(list[str], texts))


def text_difference(first: str, second: str) -> str:
    """Return how two texts of tokenizer.json differ, as `tokenizer_difference` does."""
    if first == second:
        return ""
    try:
        ours, theirs = canonical_tokenizer(first), canonical_tokenizer(second)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    if ours == theirs:
        return ""
    ids = [_tokens_by_id(each) for each in (ours, theirs)]
    sizes = f"{len(ids[0])} and {len(ids[1])} ids"
    for token_id in sorted({*ids[0], *ids[1]}):
        pair = [known.get(token_id) for known in ids]
        if pair[0] != pair[1]:
            return f"{sizes}, the first that differs {token_id}: {_named(pair[0])} and {_named(pair[1])}"
    for index, (mine, other) in enumerate(zip_longest(ours["merges"], theirs["merges"])):
        if mine != other:
            return f"{sizes}, all equal; the first merge that differs {index}: {mine} and {other}"
    return f"{sizes}, all equal; other tokens are added"


def tokenizer_text(model: str) -> str | None:
    """Return the tokenizer of a directory or GGUF file as the text of a tokenizer.json; None if there is none, and for
    a hub id.

    Raises:
        GgufError: the GGUF file, or its tokenizer, is not supported.
        OSError, UnicodeDecodeError: a file cannot be read.
    """
    source = Path(os.path.expanduser(model))
    if (path := source / _FILE).is_file():
        return path.read_text(encoding="utf-8")
    file = find_gguf(source)
    return None if file is None else read_tokenizer(read_header(file)).text


def _tokens_by_id(tokenizer: dict[str, list[Any]]) -> dict[int, str]:
    vocab = tokenizer["vocab"]
    entries = [(entry[1], entry[0]) if isinstance(entry, list) else (index, entry) for index, entry in enumerate(vocab)]
    return dict(entries) | {token_id: content for token_id, content in tokenizer["added_tokens"]}


def _named(token: str | None) -> str:
    return "none" if token is None else repr(token)
