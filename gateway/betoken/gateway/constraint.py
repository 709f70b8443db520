"""Converts a request's constraints to the router's; unsupported ones are rejected by name.

What calls of tools have to keep to is mapped by `tool_choice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from betoken.gateway.body import UNKNOWN_FIELD, refuse

_SCHEMA_FIELDS = {"name", "description", "schema", "strict"}


def format_constraint(given: Mapping[str, Any], *, is_flat: bool = False) -> Mapping[str, Any] | None:
    """The constraint of `response_format`, or of the format of OpenAI's responses, which `is_flat`; None for plain
    text.

    Raises:
        PydanticCustomError: anything but text, json_object and json_schema, or one of them without its fields.
    """
    kind = given.get("type")
    if kind in ("text", "json_object"):
        if set(given) != {"type"}:
            raise refuse(min(set(given) - {"type"}), f"is not a field of {kind}")
        return {"json_object": True} if kind == "json_object" else None
    if kind != "json_schema":
        raise refuse("type", "must be text, json_object or json_schema")
    path = "" if is_flat else "json_schema."
    described = {key: value for key, value in given.items() if key != "type"} if is_flat else given.get("json_schema")
    if not is_flat and set(given) != {"type", "json_schema"}:
        raise refuse("json_schema", "must be the only field")
    if not isinstance(described, Mapping):
        raise refuse("json_schema", "must be an object")
    if unknown := sorted(set(described) - _SCHEMA_FIELDS):
        raise refuse(path + unknown[0], UNKNOWN_FIELD)
    schema = described.get("schema")
    if not isinstance(schema, Mapping):
        raise refuse(f"{path}schema", "must be a JSON schema")
    return {"json_schema": schema}
