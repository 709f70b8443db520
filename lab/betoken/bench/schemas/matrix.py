"""Schemas by drafters and temperatures: complete answers are valid, and all have the tokens of plain decoding.

    python -m betoken.bench.structured --schemas

Counts do not depend on the machine. Knows the SDK; whose services they are is the caller's.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from betoken.bench.schemas import Case
from betoken.client import AsyncClient, Completion

DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "none": {"off": True},
    "model": {"drafter": "model", "num_draft_tokens": 4},
    "tree of n-grams": {"drafter": "ngram", "num_draft_tokens": 8, "drafter_settings": {"max_branches": 4}},
    "grammar": {"drafter": "grammar", "num_draft_tokens": 8},
}
TEMPERATURES = (0.0, 0.8)
MAX_NEW_TOKENS = 120
_PROMPT = 'Say {"name": "ab", "age": 12, "at": "2020-01-02"}, "on" or "off", [1, 2], null, true, 12-34:\n'
_NUM_AT_ONCE = 8
_CLOSING = '"]},'
_CLOSING_BIAS = 4.0
"""Added to the logits of what ends a text, or a model that knows no JSON would hardly ever come to an end."""
_CHECKED_FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))


@dataclass(slots=True)
class Cell:
    """Counts of one drafter at one temperature."""

    num_complete: int = 0
    num_cut: int = 0
    """Answers that came to their greatest length."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    invalid: list[str] = field(default_factory=list)
    """Complete answers that do not keep to their schema, and how."""
    unequal: list[str] = field(default_factory=list)
    """Cases whose tokens differ from plain decoding's."""

    def row(self) -> dict[str, Any]:
        """Its counts."""
        return {
            "complete": self.num_complete,
            "cut": self.num_cut,
            "invalid": len(self.invalid),
            "unequal": len(self.unequal),
            "drafted": self.num_draft_tokens,
            "accepted": self.num_accepted_tokens,
        }

    def add(self, case: Case, answer: Completion, plain: Completion) -> None:
        """One more answer."""
        self.num_draft_tokens += answer.speculation.num_draft_tokens
        self.num_accepted_tokens += answer.speculation.num_accepted_tokens
        if answer.output_ids != plain.output_ids or answer.finish_reason != plain.finish_reason:
            self.unequal.append(case.name)
        if answer.finish_reason != "stop":
            self.num_cut += 1
            return
        self.num_complete += 1
        if fault := _fault(answer.text, case.schema):
            self.invalid.append(f"{case.name}: {answer.text!r}: {fault}")


Cells = dict[tuple[str, float], Cell]


async def fill(
    client: AsyncClient,
    cases: Sequence[Case],
    drafters: Mapping[str, Mapping[str, Any]] = DRAFTERS,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Cells:
    """All cells; the first of `drafters` is plain decoding."""
    busy = asyncio.Semaphore(_NUM_AT_ONCE)
    closing = [ids[0] for text in _CLOSING if len(ids := await client.tokenize(text, add_special_tokens=False)) == 1]
    cells: Cells = {(name, temperature): Cell() for temperature in temperatures for name in drafters}

    async def ask(index: int, temperature: float, speculation: Mapping[str, Any]) -> Completion:
        async with busy:
            return await client.complete(
                _PROMPT,
                constraint={"json_schema": cases[index].schema},
                max_new_tokens=MAX_NEW_TOKENS,
                temperature=temperature,
                seed=index,
                logit_bias=dict.fromkeys(closing, _CLOSING_BIAS),
                timeout_s=600,
                **speculation,
            )

    async def compare(index: int, temperature: float) -> None:
        answers = await asyncio.gather(*(ask(index, temperature, options) for options in drafters.values()))
        for name, answer in zip(drafters, answers, strict=True):
            cells[name, temperature].add(cases[index], answer, answers[0])

    await asyncio.gather(*(compare(index, temperature) for index in range(len(cases)) for temperature in temperatures))
    return cells


def _fault(text: str, schema: dict[str, Any]) -> str:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=_CHECKED_FORMATS)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""
