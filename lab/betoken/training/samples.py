"""Token sequences to learn from, and the JSONL files that hold prompts, texts and answers.

Knows files and a tokenizer; it knows no model and no loss.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence: a prompt and what follows it."""

    ids: tuple[int, ...]
    prompt_length: int
    """Leading ids that are given; what follows is learnt. 0 for plain text, which is learnt from its second id on."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a `.jsonl` or `.jsonl.gz` file, each with its place for error messages.

    Raises:
        ValueError: a line is not a JSON object.
    """
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            yield f"{path}:{number}", record


def prompt_ids(record: dict[str, Any], place: str, tokenizer: Any) -> list[int]:
    """Ids of a record's prompt: `prompt` is plain text, `messages` or `turns` (the first) is a chat.

    Raises:
        ValueError: there is none, or a chat meets a tokenizer without a chat template.
    """
    if isinstance(prompt := record.get("prompt"), str) and prompt:
        return list(tokenizer.encode(prompt))
    turns = record.get("turns")
    messages = record.get("messages") or ([{"role": "user", "content": turns[0]}] if turns else None)
    if not messages:
        raise ValueError(f"{place}: prompt, messages or turns is missing")
    if tokenizer.chat_template is None:
        raise ValueError(f"{place}: a chat, and the tokenizer has no chat template")
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def read_prompts(path: Path, tokenizer: Any, limit: int | None = None) -> list[list[int]]:
    """Ids of the first `limit` prompts of a file, all where None.

    Raises:
        OSError: the file does not exist.
        ValueError: see `read_records` and `prompt_ids`; or the file holds no prompt.
    """
    prompts: list[list[int]] = []
    for place, record in read_records(path):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(prompt_ids(record, place, tokenizer))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def read_texts(path: Path, tokenizer: Any) -> list[Sample]:
    """Given text: records with `text`, or with a prompt (see `prompt_ids`) and a `completion`.

    Raises:
        OSError: the file does not exist.
        ValueError: a record holds neither, or the file none.
    """
    samples: list[Sample] = []
    for place, record in read_records(path):
        if isinstance(text := record.get("text"), str):
            samples.append(Sample(tuple(tokenizer.encode(text)), 0))
            continue
        if not isinstance(completion := record.get("completion"), str):
            raise ValueError(f"{place}: text, or prompt and completion, is missing")
        prompt = prompt_ids(record, place, tokenizer)
        samples.append(Sample((*prompt, *tokenizer.encode(completion, add_special_tokens=False)), len(prompt)))
    if not samples:
        raise ValueError(f"{path} holds no texts")
    return samples


def write_sample(sample: Sample) -> str:
    """One line of a file of samples."""
    return json.dumps({"ids": sample.ids, "prompt_length": sample.prompt_length}, separators=(",", ":")) + "\n"


def read_samples(path: Path) -> list[Sample]:
    """The samples that `write_sample` wrote; a last line that was cut off is left out.

    Raises:
        ValueError: another line is none.
    """
    samples: list[Sample] = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True) if path.exists() else (), start=1):
        if line.endswith("\n"):
            try:
                record = json.loads(line)
                samples.append(Sample(tuple(record["ids"]), record["prompt_length"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a sample: {line[:60]!r}") from error
    return samples


def clip(samples: Sequence[Sample], max_length: int) -> list[Sample]:
    """Pieces of at most `max_length` ids; a text goes on in the next piece, an answer is cut there.

    Pieces that leave nothing to learn are left out.
    """
    pieces: list[Sample] = []
    for sample in samples:
        if sample.prompt_length:
            pieces.append(Sample(sample.ids[:max_length], sample.prompt_length))
        else:
            starts = range(0, len(sample.ids), max_length)
            pieces += [Sample(sample.ids[start : start + max_length], 0) for start in starts]
    return [piece for piece in pieces if len(piece.ids) > max(8, piece.prompt_length + 1)]
