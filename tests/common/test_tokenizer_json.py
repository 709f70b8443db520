"""Where two tokenizers differ, and that equal hashes mean no difference."""

import json
from pathlib import Path
from typing import Any

import pytest

from betoken.common.tokenizer_json import hash_tokenizer_json, tokenizer_difference
from tests.engine.gguf_files import TOKENS, tiny_model, write_gguf

VOCAB = {"a": 0, "b": 1, "ab": 2}


def save(folder: Path, vocab: Any = VOCAB, merges: Any = ("a b",), added: Any = ()) -> str:
    folder.mkdir()
    added = [{"id": token_id, "content": content} for token_id, content in added]
    text = json.dumps({"model": {"vocab": vocab, "merges": merges}, "added_tokens": added})
    (folder / "tokenizer.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"vocab": VOCAB | {"c": 3}}, "3 and 4 ids, the first that differs 3: none and 'c'"),
        ({"vocab": {"a": 0, "x": 1, "ab": 2}}, "3 and 3 ids, the first that differs 1: 'b' and 'x'"),
        ({"added": [(3, "<s>")]}, "3 and 4 ids, the first that differs 3: none and '<s>'"),
        ({"merges": ["b a"]}, "3 and 3 ids, all equal; the first merge that differs 0: ['a', 'b'] and ['b', 'a']"),
        ({"added": [(0, "a")]}, "3 and 3 ids, all equal; other tokens are added"),
        ({"vocab": [["a", 0.0], ["c", -1.0]]}, "3 and 2 ids, the first that differs 1: 'b' and 'c'"),
        ({"merges": [["a", "b"]]}, ""),
        ({}, ""),
    ],
)
def test_sizes_and_first_difference_of_two_tokenizers_are_reported(
    tmp_path: Path, other: dict[str, Any], reported: str
) -> None:
    first, second = save(tmp_path / "first"), save(tmp_path / "second", **other)
    assert tokenizer_difference(first, second) == reported
    texts = [Path(folder, "tokenizer.json").read_text() for folder in (first, second)]
    assert (hash_tokenizer_json(texts[0]) == hash_tokenizer_json(texts[1])) == (reported == "")


def test_tokenizers_of_gguf_files_are_compared(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "first.gguf", model=tiny_model(num_layers=1))
    tokens = [*TOKENS[:7], "\u00e9", *TOKENS[8:]]
    changes = {"tokenizer.ggml.tokens": tokens}
    second = write_gguf(tmp_path / "second.gguf", model=tiny_model(num_layers=1), changes=changes)
    assert tokenizer_difference(first, first) == ""
    assert tokenizer_difference(first, second).endswith(f"the first that differs 7: {TOKENS[7]!r} and '\u00e9'")


def test_tokenizers_that_cannot_be_compared_have_no_difference(tmp_path: Path) -> None:
    first, broken = save(tmp_path / "first"), save(tmp_path / "broken")
    Path(broken, "tokenizer.json").write_text("{")
    for other in (broken, str(tmp_path), "some/hub-id", "~nobody/x", "m" * 300):
        assert tokenizer_difference(first, other) == "" == tokenizer_difference(other, first)
