"""Errors of the router and the workers in OpenAI's form: a client is shown its own fields, never ours."""

import pytest

from betoken.client import InvalidArgumentError, ToolFormat
from betoken.gateway.chat import ChatBody
from betoken.gateway.errors import failure_of

TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("field", ["open.committed_ids", "block.draft_ids", "resume_ids[3]", "close.sequence_id"])
def test_an_error_of_a_field_that_no_client_sends_is_internal(field: str) -> None:
    failure = failure_of(InvalidArgumentError(field, "3 tokens", "must be allowed"))
    assert (failure.status, failure.type, failure.param) == (500, "api_error", None)


@pytest.mark.parametrize(
    ("field", "param"),
    [("open.constraint.regex", "betoken.constraint.regex"), ("open.max_length", "max_tokens"), ("n", "n")],
)
def test_an_error_of_a_workers_field_names_the_clients_field(field: str, param: str) -> None:
    failure = failure_of(InvalidArgumentError(field, "x", "must be less"))
    assert (failure.status, failure.param) == (400, param) and failure.message.startswith(f"{param} = x")


def test_an_error_of_a_grammar_of_calls_names_the_tools() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    body = ChatBody.model_validate(chat)
    (asked,) = body.questions(ToolFormat("hermes", {}))
    for field in ("constraint", "constraint.lark", "open.constraint.lark"):
        assert failure_of(InvalidArgumentError(field, "3 tokens on", "no token"), asked.names).param == "tools"
