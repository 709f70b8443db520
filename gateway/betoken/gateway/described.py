"""JSON schemas of bodies as they are read: null is the same as absent, and a refused field takes what asks for nothing.

Knows pydantic's schemas, and no field of any request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_body(schema: dict[str, Any], refused: Mapping[str, tuple[str, tuple[Any, ...]]]) -> None:
    """Replaces the schema of a body's fields by the accepted values."""
    properties = schema.setdefault("properties", {})
    required = schema.get("required", ())
    for name, property_ in properties.items():
        if name not in required:
            properties[name] = _or_null(property_)
    for name, (why, neutral) in refused.items():
        properties[name] = {"enum": [*neutral, None], "description": f"{why[0].upper()}{why[1:]}."}


def _or_null(property_: dict[str, Any]) -> dict[str, Any]:
    null = {"type": "null"}
    if null in property_.get("anyOf", ()):
        return property_
    about = {key: value for key, value in property_.items() if key in ("title", "description", "default")}
    kind = {key: value for key, value in property_.items() if key not in about}
    return about | {"anyOf": [kind, null]}
