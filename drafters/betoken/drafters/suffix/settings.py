"""Settings of drafting from a memory of earlier texts, and the worker's option for the memory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.settings import setting

MAX_MATCH = 32
"""Longest match in a memory, tokens; longer ones count as this."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 34


@dataclass(frozen=True, slots=True)
class SuffixSettings(NgramSettings):
    """How to look up in the sequence's own text, as `ngram`, and in the memory."""

    min_match: int = setting(2, "Shortest match in the memory of `suffix` that it drafts from, tokens.", 2, MAX_MATCH)
    draft_offset: int = setting(0, "Tokens added to the longest draft from the memory of `suffix`.", 0, 512)
    min_percent: int = setting(10, "Lowest probability of a token that `suffix` drafts from memory, per cent.", 0, 100)

    def max_depth(self, match_length: int, num_tokens: int) -> int:
        """Most tokens of a path from memory after a match: `draft_factor` times its length, plus `draft_offset`."""
        if not self.draft_factor:
            return num_tokens
        return min(num_tokens, self.draft_factor * match_length + self.draft_offset)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The memory of a worker, as `--suffix-memory` gives it."""

    max_bytes: int = 64 << 20
    """Memory for texts, bytes."""
    shared_tenants: bool = False
    """Whether a tenant is drafted for from texts of others."""
    file: Path | None = None
    """File that keeps the texts over restarts; None = they are lost."""
    corpus: tuple[str, ...] = ()
    """Files that every tenant is drafted for from."""

    @classmethod
    def parse(cls, text: str) -> MemoryOptions:
        """Read `max_bytes=1000000 corpus=a.txt,b.jsonl`: names and values separated by spaces, quoted as in a shell.

        Raises:
            ValueError: a name is unknown or repeated, or a value is outside its range.
        """
        names, given = [each.name for each in fields(cls)], dict[str, str]()
        for part in shlex.split(text):
            name, _, value = part.partition("=")
            if name not in names or name in given or not value:
                raise ValueError(f"{part!r}: must be NAME=VALUE, each name once, of {', '.join(names)}")
            given[name] = value
        default = cls()
        max_bytes = given.get("max_bytes", str(default.max_bytes))
        if not (max_bytes.isascii() and max_bytes.isdigit() and _LEAST_BYTES <= int(max_bytes[:20]) <= _MOST_BYTES):
            raise ValueError(f"max_bytes = {max_bytes}: must be an integer from {_LEAST_BYTES} to {_MOST_BYTES}")
        if (shared := given.get("shared_tenants", "0")) not in ("0", "1"):
            raise ValueError(f"shared_tenants = {shared}: must be 0 or 1")
        corpus = tuple(path for path in given.get("corpus", "").split(",") if path)
        return cls(int(max_bytes), shared == "1", Path(given["file"]) if "file" in given else None, corpus)
