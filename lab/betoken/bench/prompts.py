"""Prompt files: `.jsonl` or `.jsonl.gz` with one object per line, holding `prompt` or `turns`.

Knows nothing of tokenizers; the services and the baseline each tokenize the text themselves.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its index in the file and its text (of `turns`, the first)."""

    index: int
    text: str
    category: str = ""
    """Name in the file; empty if absent."""


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a file, all when None.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not complete text, a line is not an object with a non-empty `prompt` or `turns`, or
            the file is empty.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(_lines_of(path), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            record = _record_of(line, f"{path}:{number}")
            text = _text_of(record, f"{path}:{number}")
            prompts.append(Prompt(len(prompts), text, str(record.get("category", ""))))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def fingerprint(prompts: list[Prompt]) -> str:
    """SHA-256 hex over the prompts' texts in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.text.encode() + b"\0")
    return digest.hexdigest()


def _lines_of(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        try:
            yield from lines
        except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


def _record_of(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


def _text_of(record: object, where: str) -> str:
    if isinstance(record, dict):
        turns = record.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
        if isinstance(text, str) and text:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"{where}: the text holds half of a surrogate pair, which is not a character")
            return text
    raise ValueError(f"{where}: expected an object with a non-empty `prompt` or `turns`")
