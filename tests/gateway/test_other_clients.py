"""Clients that are not ours: LangChain's, `llm`, and OpenAI's for Node where it is installed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Gate

NODE_MODULES = Path(os.environ.get("BETOKEN_NODE_MODULES", Path(__file__).parents[2] / ".venv/node/node_modules"))
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


needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "openai").is_dir(),
    reason="needs node and the package openai in .venv/node or BETOKEN_NODE_MODULES",
)


async def run_node(folder: Path, script: str, *arguments: str) -> Any:
    """What a script prints as JSON."""
    (folder / "ask.mjs").write_text(script)
    (folder / "node_modules").symlink_to(NODE_MODULES)
    process = await asyncio.create_subprocess_exec(
        "node", str(folder / "ask.mjs"), *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    return json.loads(out)


@needs_node
async def test_openais_client_for_node_asks_and_streams(gate: Gate, tmp_path: Path) -> None:
    told = await run_node(tmp_path, SCRIPT, f"{gate.url}/v1")
    assert told["whole"] == told["text"] != "" and told["refused"] == "400 top_p"


def use_llm(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str, model: str) -> Any:
    """The package `llm` with its OpenAI plug-in set up as its documentation has it; the model is `ours`."""
    llm = pytest.importorskip("llm")
    served = {"model_id": "ours", "model_name": model, "api_base": url, "supports_schema": True}
    text = [served, served | {"model_id": "completing", "completion": True}]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(text))  # JSON is YAML
    monkeypatch.setenv("LLM_USER_PATH", str(folder))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    return llm


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
