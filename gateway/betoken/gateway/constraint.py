"""The one place where a request's constraints become the router's: so far none exist, and each is refused by name.

`response_format`, `tool_choice`, `parallel_tool_calls` and `prediction` are to be mapped here once `GenerateRequest`
has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from betoken.gateway.body import refuse


def check_response_format(given: Mapping[str, Any]) -> None:
    """Raises:
    PydanticCustomError: anything but text.
    """
    kind = given.get("type")
    if kind in ("json_object", "json_schema"):
        raise refuse("type", f"{kind} is not supported yet")
    if given != {"type": "text"}:
        raise refuse("type", "must be text")


def check_tool_choice(given: str | Mapping[str, Any]) -> None:
    """Raises:
    PydanticCustomError: a call that has to be made, which only a grammar guarantees.
    """
    if given not in ("none", "auto"):
        raise ValueError("must be none or auto: no call can be forced yet")
