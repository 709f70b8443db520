"""The operator's corpus: text in the target's tokens, ids as they are, and faults by file and line."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.suffix.corpus import read_corpus
from betoken.drafters.suffix.memory import CORPUS

LINES = ["two two two", [3, 2, 1], {"text": "one one one"}, {"ids": [1, 2, 3]}]


def tokenizer_text():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def documents(*paths, text=tokenizer_text):
    store = read_corpus([str(path) for path in paths], text)
    return [ids.tolist() for ids in store.documents(CORPUS)]


def test_corpus_files_hold_texts_and_ids(tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one two\nthree three")
    lines.write_text("\n".join(map(json.dumps, LINES)))
    assert documents(plain, lines) == [[1, 2, 3, 3], [2, 2, 2], [3, 2, 1], [1, 1, 1], [1, 2, 3]]
    assert read_corpus([], tokenizer_text) is None


def test_a_large_corpus_is_held_as_a_whole(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(json.dumps(list(range(n, n + 700))) for n in range(40)))
    assert len(documents(path, text=lambda: "")) == 40


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"one", "text needs a tokenizer"),
        ("a.txt", b"\xff\xfe", "utf-8"),
        ("a.jsonl", b'[1]\n{"ids": [-1]}', "line 2: must be a text"),
        ("a.jsonl", b"[1, true]", "line 1: must be a text"),
        ("a.jsonl", b"[1]\n[", "line 2: "),
        ("missing.txt", None, "No such file"),
    ],
)
def test_a_bad_corpus_file_is_rejected_by_name(tmp_path, name, content, fault):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FailedPreconditionError, match=rf"--suffix-memory: corpus = .*{name}: .*{fault}"):
        read_corpus([str(path)], lambda: "")


def test_an_id_of_a_corpus_outside_the_vocabulary_is_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text("[1, 2, 4]")
    with pytest.raises(FailedPreconditionError, match="line 1: token id 4 must be below 4"):
        documents(tmp_path / "a.jsonl")
