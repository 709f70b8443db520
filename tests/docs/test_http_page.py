"""The HTTP page names every field that bodies have or reject, and its examples are programs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import chat, completion_create_params, responses, shared_params
from openai.types.chat import chat_completion_message_function_tool_call_param as chat_calls
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_input_item_param

from betoken.gateway.app import create_app
from betoken.gateway.body import Body, Extension, GenerationBody, Prediction, PredictionPart, StreamOptions
from betoken.gateway.chat import ChatBody
from betoken.gateway.completions import CompletionBody
from betoken.gateway.infill import ExtraFile, InfillBody
from betoken.gateway.messages import CalledFunction, Message, TextPart, ToolCall
from betoken.gateway.responses import (
    FlatTool,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    Reasoning,
    ResponsesBody,
    TextOptions,
)
from betoken.gateway.settings import GatewaySettings
from betoken.gateway.tools import Function, Tool

BODIES: dict[str, tuple[type[GenerationBody], Any]] = {
    "C": (CompletionBody, completion_create_params.CompletionCreateParams),
    "H": (ChatBody, chat_create_params.CompletionCreateParams),
    "R": (ResponsesBody, response_create_params.ResponseCreateParams),
}
NESTED: list[tuple[type[Body], Any]] = [
    (StreamOptions, chat.ChatCompletionStreamOptionsParam),
    (StreamOptions, response_create_params.StreamOptions),
    (Prediction, chat.ChatCompletionPredictionContentParam),
    (PredictionPart, chat.ChatCompletionContentPartTextParam),
    (TextPart, chat.ChatCompletionContentPartTextParam),
    (Message, chat.ChatCompletionAssistantMessageParam),
    (Message, chat.ChatCompletionDeveloperMessageParam),
    (Message, chat.ChatCompletionSystemMessageParam),
    (Message, chat.ChatCompletionToolMessageParam),
    (Message, chat.ChatCompletionUserMessageParam),
    (ToolCall, chat.ChatCompletionMessageFunctionToolCallParam),
    (CalledFunction, chat_calls.Function),
    (Tool, chat.ChatCompletionFunctionToolParam),
    (Function, shared_params.FunctionDefinition),
    (FlatTool, responses.FunctionToolParam),
    (Reasoning, shared_params.Reasoning),
    (TextOptions, responses.ResponseTextConfigParam),
    (InputMessage, responses.EasyInputMessageParam),
    (InputMessage, responses.ResponseOutputMessageParam),
    (InputMessage, response_input_item_param.Message),
    (InputCall, responses.ResponseFunctionToolCallParam),
    (InputCallOutput, response_input_item_param.FunctionCallOutput),
    (InputReasoning, responses.ResponseReasoningItemParam),
    (InputText, responses.ResponseInputTextParam),
    (InputText, responses.ResponseOutputTextParam),
]
PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def table(title: str) -> list[list[str]]:
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| `")]


def rows(letter: str) -> dict[str, str]:
    """Description of each field of one kind of request."""
    found = [(row[0], row[2].strip()) for row in table("Fields") if letter in row[1].split()]
    named = [(name, text) for names, text in found for name in re.findall(r"`(\w+)`", names)]
    assert len(named) == len(dict(named)), "twice"
    return dict(named)


@pytest.mark.parametrize("letter", BODIES)
def test_the_table_names_every_field_and_whether_it_is_refused(letter: str) -> None:
    body, of = BODIES[letter][0], rows(letter)
    assert of.keys() == {*body.model_fields, *body.refused}
    for name, text in of.items():
        assert text.startswith("refused") == (name in body.refused), name
        for neutral in body.refused.get(name, ("", ()))[1]:
            said = neutral if neutral and isinstance(neutral, str) else json.dumps(neutral)
            assert said in text, f"{name}: {said} is taken"


@pytest.mark.parametrize("letter", BODIES)
def test_every_field_of_openais_requests_has_a_row(letter: str) -> None:
    fields = {name for kind in get_args(BODIES[letter][1]) for name in get_type_hints(kind)}
    assert len(fields) >= 18 and fields <= rows(letter).keys(), fields - rows(letter).keys()


@pytest.mark.parametrize(("ours", "theirs"), NESTED, ids=lambda kind: kind.__name__)
def test_every_field_of_openais_objects_within_requests_is_known(ours: type[Body], theirs: Any) -> None:
    fields = get_type_hints(theirs).keys()
    assert fields and fields <= {*ours.model_fields, *ours.refused}


def test_the_tables_name_every_field_of_infill() -> None:
    section = PAGE.partition("## Completion for editors\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {*InfillBody.model_fields, *InfillBody.refused, *ExtraFile.model_fields} <= named


def test_the_extension_is_reported() -> None:
    assert all(f"`{name}`" in PAGE for name in Extension.model_fields)


def test_the_table_names_every_endpoint() -> None:
    app = create_app(None, GatewaySettings())  # type: ignore[arg-type]
    paths = {re.sub(r"\{.*", "ID", path) for path in app.openapi()["paths"]}
    assert paths <= set(re.findall(r"(?:GET|POST) (/[\w./]*)", PAGE)) | {"/"}


def test_python_in_the_page_is_python() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)
