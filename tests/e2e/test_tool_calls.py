"""Calls that have to be made, by OpenAI's client through all services: a random model makes them, and no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.in_process import running, save_pair
from tests.gateway.conftest import running_gateway
from tests.gateway.tools import HERMES, SCHEMA, WEATHER
from tests.products import slow

MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>")
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Go."}], "tools": [WEATHER, NOW], "max_tokens": 120}


@pytest.fixture(scope="module", params=[HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(template: str, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    save_pair(tmp_path)
    options = {"attached_drafters": ("grammar",)}
    async with (
        running(tmp_path, verify_options=options, chat_template=template) as services,
        running_gateway(None, services.address) as gate,
    ):
        yield gate.openai


async def test_required_and_named_calls_are_made_whatever_the_model_is(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id

    async def calls(seed: int, **options: Any) -> list[tuple[str, str]]:
        answer = await client.chat.completions.create(model=model, seed=seed, **ASKED | options)
        (choice,) = answer.choices
        assert choice.finish_reason == "length" or not choice.message.content, "nothing but calls"
        made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        if choice.finish_reason == "tool_calls":
            for name, arguments in made:
                jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"maxProperties": 0})
        assert made
        return made

    free = await asyncio.gather(*(calls(seed, tool_choice="required") for seed in range(4)))
    assert {name for made in free for name, _ in made} <= {"weather", "now"}
    one = await asyncio.gather(*(calls(seed, tool_choice="required", parallel_tool_calls=False) for seed in range(4)))
    assert all(len(made) == 1 for made in one)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for name in ("now", "weather"):
        named["function"]["name"] = name
        chosen = await asyncio.gather(*(calls(seed, tool_choice=named) for seed in range(4)))
        assert {called for made in chosen for called, _ in made} == {name}
    options: Any = {"tool_choice": named, "parallel_tool_calls": False}
    plain = await calls(5, **options, extra_body={"betoken": {"off": True}})
    for drafter in ("grammar", "model", "ngram"):
        assert await calls(5, **options, extra_body={"betoken": {"drafter": drafter}}) == plain


async def test_streams_and_responses_report_the_same_calls_piece_by_piece(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    options: Any = {"model": model, "seed": 3, "tool_choice": "required", "parallel_tool_calls": False}
    options |= {"tools": [WEATHER]}
    whole = await client.chat.completions.create(**ASKED | options)
    (call,) = whole.choices[0].message.tool_calls or ()
    pieces = []
    async for event in await client.chat.completions.create(**ASKED | options, stream=True):
        pieces += event.choices[0].delta.tool_calls or []
    assert pieces[0].function.name == call.function.name and pieces[0].id
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments and len(pieces) > 1
    flat = [{"type": "function", **tool["function"]} for tool in options["tools"]]
    asked: Any = {
        "model": model,
        "input": "Go.",
        "tools": flat,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    asked |= {"extra_body": {"seed": 3}, "max_output_tokens": 120}
    response = await client.responses.create(**asked)
    (item,) = response.output
    assert (item.type, item.name, item.arguments) == ("function_call", call.function.name, call.function.arguments)
    told = ""
    async with client.responses.stream(**asked) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                told += event.delta
    assert told == item.arguments


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=4)
    days: int = pydantic.Field(ge=1, le=9)


@pytest.mark.parametrize("template", [HERMES, *slow(MISTRAL, LLAMA)], indirect=True)
async def test_pydantic_models_are_parsed_as_formats_and_as_strict_tools(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    asked: Any = {"model": model, "messages": ASKED["messages"], "max_tokens": 160, "temperature": 0.7}
    parsed = []
    for seed in range(6):
        try:
            answer = await client.chat.completions.parse(**asked, seed=seed, response_format=Weather)
        except openai.LengthFinishReasonError:
            continue
        parsed.append(answer.choices[0].message.parsed)
    assert parsed and all(isinstance(each, Weather) for each in parsed)
    tool = openai.pydantic_function_tool(Weather)
    called = []
    for seed in range(6):
        try:
            answer = await client.chat.completions.parse(
                **asked, seed=seed, tools=[tool], tool_choice="required", parallel_tool_calls=False
            )
        except openai.LengthFinishReasonError:
            continue
        (call,) = answer.choices[0].message.tool_calls or ()
        called.append(call.function.parsed_arguments)
    assert called and all(isinstance(each, Weather) for each in called)
