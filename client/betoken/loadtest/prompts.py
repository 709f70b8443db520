"""Prompt files: `.jsonl` or `.jsonl.gz` with one object per line, holding `prompt`, `turns` or `messages`.

These are the layouts of HumanEval, Spec-Bench and a prepared SPEED-Bench, whose folder holds several files. Knows
nothing of tokenizers; services tokenize the text themselves.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MISSING_TEXT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Begin of SPEED-Bench's placeholder for texts that its preparation script has to fetch."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its index in the file and its text (of a conversation, the user's first)."""

    index: int
    text: str
    category: str = ""
    """Name in the file; empty if absent."""
    is_chat: bool = False
    """Whether it is from a conversation: `turns` or `messages`."""


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a file, or of all files of a folder and its subfolders by name; all when None.

    Raises:
        OSError: the file does not exist.
        ValueError: a file is not complete text, a line is not an object with a non-empty `prompt`, `turns` or
            `messages`, or the path holds no prompts.
    """
    prompts: list[Prompt] = []
    for file in _files_of(path):
        for number, line in enumerate(_lines_of(file), start=1):
            if limit is not None and len(prompts) >= limit:
                break
            if line.strip():
                where = f"{file}:{number}"
                record = _record_of(line, where)
                is_chat = isinstance(record, dict) and ("turns" in record or "messages" in record)
                text = _text_of(record, where)
                prompts.append(Prompt(len(prompts), text, str(record.get("category", "")), is_chat))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def fingerprint(prompts: list[Prompt]) -> str:
    """SHA-256 hex over the prompts' texts in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.text.encode() + b"\0")
    return digest.hexdigest()


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for pattern in ("*.jsonl", "*.jsonl.gz") for file in path.rglob(pattern))
    if not files and any(path.rglob("*.parquet")):
        raise ValueError(f"{path} holds Parquet files only; write their rows to .jsonl files, one object per line")
    return files


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
    text = _first_text(record) if isinstance(record, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: expected an object with a non-empty `prompt`, `turns` or `messages`")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where}: the text holds half of a surrogate pair, which is not a character")
    if text.startswith(_MISSING_TEXT):
        raise ValueError(f"{where}: SPEED-Bench's placeholder; its preparation script has to fetch the texts first")
    return text


def _first_text(record: dict[str, Any]) -> object:
    turns, messages = record.get("turns"), record.get("messages")
    if isinstance(turns, list) and turns:
        return turns[0]
    if isinstance(messages, list):
        users = (one.get("content") for one in messages if isinstance(one, dict) and one.get("role") == "user")
        return next(users, None)
    return record.get("prompt")
