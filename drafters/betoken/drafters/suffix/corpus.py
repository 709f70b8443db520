"""Reads the operator's corpus: text files, and JSON lines of texts or ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.suffix.memory import CORPUS
from betoken.drafters.suffix.text_store import MAX_ID, PAGE_TOKENS, TextStore


def read_corpus(paths: Sequence[str], tokenizer_text: Callable[[], str]) -> TextStore | None:
    """A store with the documents of these files, whose owner is `CORPUS`; None without files.

    A file is one document in UTF-8. Each line of a `.jsonl` file is a document: a text, a list of ids, or an object
    with `text` or `ids`.

    Args:
        tokenizer_text: gives the tokenizer of the target as the text of a tokenizer.json, empty if it is not known.

    Raises:
        FailedPreconditionError: a file cannot be read, or it holds text and no tokenizer is known.
    """
    if not paths:
        return None
    encoder = _Encoder(tokenizer_text)
    documents = [ids for path in paths for ids in _documents(Path(path), encoder)]
    store = TextStore(sum(len(ids) + 1 for ids in documents) + PAGE_TOKENS)
    for ids in documents:
        store.add(CORPUS, ids)
    return store


class _Encoder:
    """Tokenizes texts and checks ids; the tokenizer is made when it is first needed."""

    def __init__(self, tokenizer_text: Callable[[], str]) -> None:
        self._tokenizer_text = tokenizer_text

    @cached_property
    def _fast(self) -> Any:
        if not (text := self._tokenizer_text()):
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_str(text)

    def encode(self, text: str) -> list[int]:
        """Raises:
        ValueError: no tokenizer is known.
        """
        if self._fast is None:
            raise ValueError("text needs a tokenizer: give --model, or token ids in a .jsonl file")
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def ids_of(self, document: Any) -> list[int]:
        """The ids of a line of JSON.

        Raises:
            ValueError: it is neither text nor ids of the vocabulary.
        """
        if isinstance(document, dict):
            document = document.get("text", document.get("ids"))
        if isinstance(document, str):
            return self.encode(document)
        if not isinstance(document, list) or not all(type(each) is int and 0 <= each for each in document):
            raise ValueError("must be a text, a list of token ids, or an object with `text` or `ids`")
        num_ids = MAX_ID + 1 if self._fast is None else self._fast.get_vocab_size()
        if (largest := max(document, default=0)) >= num_ids:
            raise ValueError(f"token id {largest} must be below {num_ids}, the size of the vocabulary")
        return document


def _documents(path: Path, encoder: _Encoder) -> Iterator[list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            yield encoder.encode(text)
            return
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.strip():
                    yield encoder.ids_of(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FailedPreconditionError(f"--suffix-memory: corpus = {path}: {reason}") from error
