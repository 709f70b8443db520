"""Translation of `response_format` and the extension to constraints."""

from typing import Any

import pytest
from pydantic import ValidationError

from betoken.gateway.chat import ChatBody
from betoken.gateway.responses import ResponsesBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": "m", "input": "hi"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {"json_schema": SCHEMA},
        ),
        ({"betoken": {"constraint": {"regex": "a+"}}}, {"regex": "a+"}),
    ],
)
def test_chat_constraints_are_translated(given: dict[str, Any], expected: Any) -> None:
    assert ChatBody.model_validate(CHAT | given).questions()[0].constraint == expected


def test_responses_constraints_are_translated() -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    for given, expected in (
        ({"text": {"format": form}}, {"json_schema": SCHEMA}),
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        ({"betoken": {"constraint": {"choice": ["a"]}}}, {"choice": ["a"]}),
        ({}, None),
    ):
        assert ResponsesBody.model_validate(RESPONSE | given).questions()[0].constraint == expected


def test_two_constraints_are_refused() -> None:
    two = {"response_format": {"type": "json_object"}, "betoken": {"constraint": {"regex": "a"}}}
    with pytest.raises(ValidationError, match="a constraint, too"):
        ChatBody.model_validate(CHAT | two)
