"""Healthy streams with known answers, for as long as the soak lasts.

Knows the SDK; knows no faults.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from betoken.client import AsyncClient, BetokenError, GenerateOptions

_TEXTS = (
    "def fibonacci(n):",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "import os\nimport sys\n\n\ndef main() -> int:\n",
    "Once upon a time there was a",
)
_MAX_NEW_TOKENS = (8, 32, 96)
_SPECULATION: tuple[GenerateOptions, ...] = ({}, {"drafter": "model", "num_draft_tokens": 4})
"""The router's default, and drafts that overlapped rounds push."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the ids that plain decoding gives."""

    prompt: str
    options: GenerateOptions
    output_ids: tuple[int, ...]


@dataclass(slots=True)
class Traffic:
    """Answers so far."""

    client: AsyncClient
    cases: list[Case]
    num_compared: int = 0
    num_equal: int = 0
    num_resumes: int = 0
    num_ahead_hits: int = 0
    """Drafts begun ahead; only drafts of `model` are pushed to the router."""
    failures: list[str] = field(default_factory=list)
    """Answers that ended in an error, in words."""

    @classmethod
    async def begin(cls, client: AsyncClient) -> Traffic:
        """Decode every case plainly, before anything is harmed."""
        cases = []
        for index, text in enumerate(_TEXTS):
            for temperature in (0.0, 0.9):
                number = _MAX_NEW_TOKENS[(index + (temperature > 0)) % len(_MAX_NEW_TOKENS)]
                options: GenerateOptions = {
                    "max_new_tokens": number,
                    "temperature": temperature,
                    "seed": index,
                    "ignore_eos": True,
                }
                plain: GenerateOptions = {**options, "off": True}
                completion = await client.complete(text, **plain)
                cases.append(Case(text, options, tuple(completion.output_ids)))
        return cls(client, cases)

    async def run(self, seed: int, ends: asyncio.Event) -> None:
        """One stream after the other, until the end."""
        chance = random.Random(seed)
        while not ends.is_set():
            case = chance.choice(self.cases)
            options: GenerateOptions = {**case.options, **chance.choice(_SPECULATION)}
            try:
                completion = await self.client.complete(case.prompt, **options)
            except BetokenError as error:
                self.failures.append(f"{error.code.name}: {error}")
                await asyncio.sleep(0.5)
                continue
            self.num_compared += 1
            self.num_equal += tuple(completion.output_ids) == case.output_ids
            self.num_resumes += completion.num_resumes
            self.num_ahead_hits += completion.speculation.num_ahead_hits
