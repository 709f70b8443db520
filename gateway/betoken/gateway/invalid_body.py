"""Refusals of bodies that fail validation: the field, its value and the limit.

Maps pydantic's error types to the gateway's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from betoken.gateway.body import UNKNOWN_FIELD
from betoken.gateway.errors import Failure

_MAX_VALUE_CHARS = 40
_OBJECT = "must be an object"
_LIMITS: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": _OBJECT,
    "extra_forbidden": UNKNOWN_FIELD,
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "must be given",
    "model_type": _OBJECT,
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}
"""Limits by pydantic's error type; other types are errors of the gateway's validators, which have their own text."""
_WITHOUT_VALUE = frozenset({"extra_forbidden", "missing", "string_unicode", "too_long", "too_short"})


def invalid_body(error: ValidationError) -> Failure:
    """Return the refusal for the first error of a body."""
    fault: Mapping[str, Any] = error.errors(include_url=False)[0]
    kind, context = fault["type"], fault.get("ctx") or {}
    place = [part for part in fault["loc"] if not str(part).startswith("<")]  # tags of unions
    if not place and kind in ("model_type", "model_attributes_type", "dict_type"):
        return not_an_object()
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if name := context.get("param"):
        param = f"{param}.{name}" if param else str(name)
    if kind not in _LIMITS:
        message = fault["msg"].removeprefix("Value error, ")
        return Failure(400, f"{param}: {message}" if param else message, param or None)
    limit = _LIMITS[kind].format_map(context)
    value = "" if kind in _WITHOUT_VALUE else f" = {_written(fault['input'])}"
    return Failure(400, f"{param}{value}: {limit}", param or None)


def not_an_object() -> Failure:
    """Return the refusal for a body that is not a JSON object, or not declared as JSON."""
    return Failure(400, "the body must be a JSON object, sent with content-type: application/json")


def _written(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
