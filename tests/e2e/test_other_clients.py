"""Tools and structured output by clients that are not ours, through all services: LangChain, Node's `openai`, `llm`.

A random model makes the calls and keeps to the schemas, since it has to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from tests.e2e.in_process import running, save_pair
from tests.gateway.clients import needs_node, run_node, use_llm
from tests.gateway.conftest import Gate, running_gateway
from tests.gateway.tools import HERMES, SCHEMA, WEATHER


class Forecast(pydantic.BaseModel):
    """Weather forecast."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Bern", "Basel"]
    days: int = pydantic.Field(ge=1, le=9)


NODE = """
import OpenAI from "openai";
const [, , baseURL, asked] = process.argv;
const { tools, schema } = JSON.parse(asked);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const options = { model, messages: [{ role: "user", content: "Go." }], seed: 3, max_tokens: 160, temperature: 0 };
const calling = { ...options, tools, tool_choice: "required", parallel_tool_calls: false };

const called = (await client.chat.completions.create(calling)).choices[0];
const stream = client.chat.completions.stream(calling);
const streamed = (await stream.finalChatCompletion()).choices[0];

const response_format = { type: "json_schema", json_schema: { name: "forecast", strict: true, schema } };
const parsed = (await client.chat.completions.parse({ ...options, response_format })).choices[0].message.parsed;
let text = "";
for await (const event of await client.chat.completions.create({ ...options, response_format, stream: true }))
  text += event.choices[0]?.delta?.content ?? "";

const flat = tools.map(({ type, function: of }) => ({ type, ...of }));
const input = { model, input: "Go.", tools: flat, tool_choice: "required", parallel_tool_calls: false, seed: 3 };
let call = "";
for await (const event of await client.responses.create({ ...input, temperature: 0, stream: true }))
  if (event.type === "response.function_call_arguments.delta") call += event.delta;
const simple = (choice) => [choice.finish_reason, ...choice.message.tool_calls.map((one) => one.function)];
console.log(JSON.stringify({ called: simple(called), streamed: simple(streamed), parsed, text, call }));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


@pytest.fixture
async def gate(folder: Path) -> AsyncIterator[Gate]:
    async with (
        running(folder, verify_options={"attached_drafters": ("grammar",)}, chat_template=HERMES) as services,
        running_gateway(None, services.address) as gate,
    ):
        yield gate


def is_forecast(value: Any) -> bool:
    return bool(Forecast.model_validate(value))


async def test_langchain_calls_tools_and_has_structured_output(gate: Gate) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = (await gate.openai.models.list()).data[0].id
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{gate.url}/v1", api_key="none", model=model, seed=3, max_tokens=160, temperature=0
    )
    calling = chat.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    whole = await calling.ainvoke("Go.")
    (call,) = whole.tool_calls
    assert call["name"] == "weather" and is_forecast(call["args"])
    pieces = [piece async for piece in calling.astream("Go.")]
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("weather", call["args"])]
    for method in ("json_schema", "function_calling"):
        keeping = chat.with_structured_output(Forecast, method=method)
        forecast = await keeping.ainvoke("Go.")
        assert isinstance(forecast, Forecast)
        assert [one async for one in keeping.astream("Go.")][-1] == forecast


@needs_node
async def test_openais_client_for_node_calls_tools_and_has_structured_output(gate: Gate, tmp_path: Path) -> None:
    asked = json.dumps({"tools": [WEATHER], "schema": SCHEMA})
    told = await run_node(tmp_path, NODE, f"{gate.url}/v1", asked)
    reason, call = told["called"]
    assert reason == "tool_calls" and call["name"] == "weather" and is_forecast(json.loads(call["arguments"]))
    assert told["streamed"][1]["arguments"] == call["arguments"] == told["call"]
    assert is_forecast(told["parsed"]) and json.loads(told["text"]) == told["parsed"]


async def test_llm_keeps_to_a_schema(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = (await gate.openai.models.list()).data[0].id
    llm = use_llm(tmp_path, monkeypatch, f"{gate.url}/v1", model)
    options: dict[str, Any] = {"schema": Forecast, "seed": 3, "temperature": 0, "max_tokens": 160}

    def ask(stream: bool) -> str:
        return str(llm.get_model("ours").prompt("Go.", stream=stream, **options).text())

    whole, streamed = await asyncio.to_thread(ask, False), await asyncio.to_thread(ask, True)
    assert whole == streamed and is_forecast(json.loads(whole))
