"""JSON schemas for tests: some small ones, and random ones of the keywords that grammars keep."""

import random
from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
EVENT = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "format": "date"},
        "who": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/id"}]},
        "done": {"type": "boolean"},
    },
    "required": ["at", "who", "done"],
    "additionalProperties": False,
    "$defs": {"id": {"type": "string", "pattern": "^[0-9a-f]{4}$"}},
}


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short."""
    kinds = ["string", "pattern", "integer", "enum", "boolean", "null", *(["object", "array", "anyOf"] * (depth > 0))]
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randrange(2), "maxLength": rng.randrange(2, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^(on|off)$", "^[0-9]{2}-[0-9]{2}$"])}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 200)}
        case "enum":
            return {"enum": rng.sample(["red", 1, None, True, "grün", -7, "a b", 12345], rng.randrange(1, 4))}
        case "object":
            names = rng.sample(["id", "x", "key", "ok", "ü"], rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": names[: rng.randrange(len(names) + 1)],
                "additionalProperties": False,
            }
        case "array":
            num_items = rng.randrange(3)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": num_items, "maxItems": num_items + 1}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}
