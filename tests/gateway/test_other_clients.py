"""Third-party clients: LangChain's, `llm`, and OpenAI's for Node if installed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.clients import needs_node, run_node, use_llm
from tests.gateway.conftest import Gate

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const options = { model, messages: [{ role: "user", content: "the" }], seed: 3, max_tokens: 12 };
const whole = (await client.chat.completions.create(options)).choices[0].message.content;
let text = "";
for await (const event of await client.chat.completions.create({ ...options, stream: true }))
  text += event.choices[0]?.delta?.content ?? "";
let refused = "";
try {
  await client.chat.completions.create({ ...options, top_p: 2 });
} catch (error) {
  refused = `${error.status} ${error.param}`;
}
console.log(JSON.stringify({ whole, text, refused }));
"""


async def test_langchain_asks_and_streams(gate: Gate) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(base_url=f"{gate.url}/v1", api_key="none", model="fake", seed=3, max_tokens=12)
    whole = await chat.ainvoke("the")
    pieces = [piece async for piece in chat.astream("the")]
    assert whole.content == "".join(piece.content for piece in pieces) != ""
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 12
    bound = chat.bind(stop=["zzz"], logprobs=True, top_logprobs=2)
    assert len((await bound.ainvoke("the")).response_metadata["logprobs"]["content"]) == 12


@needs_node
async def test_openais_client_for_node_asks_and_streams(gate: Gate, tmp_path: Path) -> None:
    told = await run_node(tmp_path, SCRIPT, f"{gate.url}/v1")
    assert told["whole"] == told["text"] != "" and told["refused"] == "400 top_p"


@pytest.mark.parametrize("model", ["ours", "completing"])
async def test_llm_asks_and_streams(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    llm = use_llm(tmp_path, monkeypatch, f"{gate.url}/v1", "fake")

    def ask(stream: bool) -> Any:
        answer = llm.get_model(model).prompt("the", stream=stream, seed=3, max_tokens=12)
        return list(answer), answer.usage()

    whole, streamed = await asyncio.to_thread(ask, False), await asyncio.to_thread(ask, True)
    assert "".join(whole[0]) == "".join(streamed[0]) != "" and len(streamed[0]) > 1
    if model == "ours":  # of completions it asks no usage
        assert whole[1].output == streamed[1].output == 12 and whole[1].input == streamed[1].input > 0
        asking = llm.get_async_model(model).prompt("the", stream=True, seed=3, max_tokens=12)
        assert "".join([piece async for piece in asking]) == "".join(whole[0])
