"""A tokenizer for pieces of text: no prefix before a piece, names of special tokens are text, no truncation."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


def plain_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Return the tokenizer of the text of a tokenizer.json.

    Raises:
        Exception: the text is not JSON, or not a tokenizer; the Rust library raises plain Exception.
    """
    data = json.loads(tokenizer_json)
    steps = {key: _without_prefix(data.get(key)) for key in ("normalizer", "pre_tokenizer")}
    is_same = all(data.get(key) == step for key, step in steps.items())
    fast = Tokenizer.from_str(tokenizer_json if is_same else json.dumps({**data, **steps}))
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return fast


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space before a text; None if nothing is left of it."""
    if not isinstance(part, dict) or part.get("type") == "Prepend":
        return None
    if part.get("type") == "Metaspace":
        return {key: value for key, value in part.items() if key != "add_prefix_space"} | {"prepend_scheme": "never"}
    for key in {"normalizers", "pretokenizers"} & part.keys():
        part = {**part, key: [each for each in map(_without_prefix, part[key]) if each is not None]}
    return part
