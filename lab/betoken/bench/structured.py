"""The saving by forced tokens where answers keep to a schema: ten extractions by a chat model, side by side.

    python -m betoken.bench.structured --target DIR
    python -m betoken.bench.structured --schemas

Each side gives the same tokens, compared one by one, and each whole answer is held against its schema. Counts of tokens
and forwards do not depend on the machine; the speed does. With `--schemas`, 200 schemas are asked for instead, by each
drafter at two temperatures, and answers are counted. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from jsonschema import Draft202012Validator

from betoken.bench.command import temperature
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.schemas import load_cases
from betoken.bench.schemas.matrix import DRAFTERS, fill
from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig, embedded_models
from betoken.client import AsyncClient, Completion

SIDES: dict[str, dict[str, Any]] = {
    "without": {"off": True},
    "grammar": {"drafter": "grammar"},
    "ngram, grammar first": {"drafter": "ngram"},
}
_PERSON = {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 130}}
_PLACE = {"city": {"type": "string", "maxLength": 40}, "country": {"type": "string", "maxLength": 40}}
_ORDER = {
    "item": {"type": "string", "maxLength": 40},
    "quantity": {"type": "integer", "minimum": 1, "maximum": 9999},
    "status": {"enum": ["ordered", "shipped", "delivered", "returned"]},
}
_EVENT = {
    "title": {"type": "string", "maxLength": 40},
    "date": {"type": "string", "format": "date"},
    "is_public": {"type": "boolean"},
}
EXTRACTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Anna Keller is 34 years old and works as a carpenter.", _PERSON),
    ("My grandfather, Peter Vogt, turned 81 last week.", _PERSON),
    ("The child's name is Mia Brunner. She is 7.", _PERSON),
    ("We landed in Lisbon, the capital of Portugal, before noon.", _PLACE),
    ("She moved from Oslo in Norway a year ago.", _PLACE),
    ("The conference takes place in Kyoto, Japan.", _PLACE),
    ("Your order of 12 blue mugs was shipped this morning.", _ORDER),
    ("The customer sent both desk lamps back.", _ORDER),
    ("The open day of the library is on 2026-05-09; everybody is welcome.", _EVENT),
    ("The board meets behind closed doors on 2026-11-30 for its budget review.", _EVENT),
]
"""Texts, and the properties that are asked for of each."""


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers of one side."""

    completions: list[Completion]
    seconds: float

    def row(self) -> dict[str, Any]:
        """Its figures."""
        stats = [each.speculation for each in self.completions]
        tokens = sum(len(each.output_ids) for each in self.completions)
        return {
            "tokens": tokens,
            "forwards": sum(each.num_verify_forwards for each in stats),
            "drafted": sum(each.num_draft_tokens for each in stats),
            "accepted": sum(each.num_accepted_tokens for each in stats),
            "forced": sum(token.source == "grammar" for each in self.completions for token in each.tokens),
            "tokens_per_s": round(tokens / self.seconds, 1),
        }


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    """An object of exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


async def ask(client: AsyncClient, options: dict[str, Any], how_random: float) -> Answers:
    """One side's answers, one after another."""
    completions, began_s = [], perf_counter()
    for text, properties in EXTRACTIONS:
        message = f"Give as JSON the {', '.join(properties)} that this text mentions.\n\n{text}"
        completions.append(
            await client.complete(
                [{"role": "user", "content": message}],
                constraint={"json_schema": schema_of(properties)},
                max_new_tokens=120,
                temperature=how_random,
                seed=1,
                timeout_s=600,
                **options,
            )
        )
    return Answers(completions, perf_counter() - began_s)


def num_valid(answers: Answers) -> int:
    """Answers that came to their end and keep to their schemas."""
    pairs = zip(EXTRACTIONS, answers.completions, strict=True)
    ended = [(each.text, properties) for (_, properties), each in pairs if each.finish_reason == "stop"]
    return sum(keeps_to(text, schema_of(properties)) for text, properties in ended)


def keeps_to(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of a schema."""
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every side's figures; `equal` says whether all tokens are the same."""
    config = LocalServicesConfig(options.target, attached_drafters=("ngram", "grammar"), drafters=())
    async with Stack(config) as stack:
        await ask(stack.client, SIDES["without"], options.temperature)  # warm up
        sides = {name: await ask(stack.client, fields, options.temperature) for name, fields in SIDES.items()}
    first = next(iter(sides.values()))
    expected = [each.output_ids for each in first.completions]
    return {
        "sides": {name: side.row() for name, side in sides.items()},
        "equal": all([each.output_ids for each in side.completions] == expected for side in sides.values()),
        "valid": num_valid(first),
        "of": len(EXTRACTIONS),
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="A chat model: a directory, a GGUF file or a hub id.")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 = greedy.")
    parser.add_argument("--schemas", action="store_true", help="200 schemas by drafters and temperatures; counts.")
    parser.add_argument("--draft", default="", help="With --schemas: a draft model, as --target.")
    options = parser.parse_args(arguments)
    if options.target is None:
        if not options.schemas:
            parser.error("--target is required without --schemas")
        if (embedded := embedded_models()) is None:
            parser.error("the embedded models are not here: name --target and --draft")
        options.target, options.draft = str(embedded / "target"), options.draft or str(embedded / "draft")
    return options


async def count(options: argparse.Namespace) -> dict[str, Any]:
    """The counts of all schemas, and the faults."""
    drafters = ("model", "ngram") if options.draft else ("ngram",)
    config = LocalServicesConfig(options.target, options.draft, drafters=drafters, attached_drafters=("grammar",))
    sides = {name: fields for name, fields in DRAFTERS.items() if name != "model" or options.draft}
    cases = load_cases()
    async with Stack(config) as stack:
        cells = await fill(stack.client, cases, sides)
    faults = [fault for cell in cells.values() for fault in (*cell.invalid, *cell.unequal)]
    rows = {f"{name}, T {temperature:g}": cell.row() for (name, temperature), cell in cells.items()}
    return {"schemas": len(cases), "cells": rows, "faults": faults}


def report_schemas(options: argparse.Namespace) -> int:
    """Prints the counts; 1 if an answer is invalid or differs from decoding without speculation."""
    told = asyncio.run(count(options))
    _print_table("drafter", told["cells"])
    print(json.dumps(told | {"versions": describe_versions()}))
    return 1 if told["faults"] else 0


def _print_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    columns = next(iter(rows.values()))
    print(f"| {title} | {' | '.join(columns)} |")
    print("|---|" + "---:|" * len(columns))
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(map(str, row.values()))} |")


def main() -> int:
    """Print the table, unless a token differs."""
    options = parse_options()
    if options.schemas:
        return report_schemas(options)
    told = asyncio.run(measure(options))
    if told["equal"]:
        _print_table("side", told["sides"])
        print(f"\n{told['valid']} of {told['of']} answers are whole and keep to their schemas; all tokens are equal")
    print(json.dumps(told | {"hardware": describe_hardware(), "versions": describe_versions()}))
    return 0 if told["equal"] and told["valid"] == told["of"] else 1


if __name__ == "__main__":
    sys.exit(main())
