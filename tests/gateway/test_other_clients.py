"""Clients that are not ours: LangChain's, and OpenAI's for Node where it is installed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

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


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "openai").is_dir(),
    reason="needs node and the package openai in .venv/node or BETOKEN_NODE_MODULES",
)
async def test_openais_client_for_node_asks_and_streams(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "ask.mjs").write_text(SCRIPT)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    process = await asyncio.create_subprocess_exec(
        "node", str(tmp_path / "ask.mjs"), f"{gate.url}/v1", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    told = json.loads(out)
    assert told["whole"] == told["text"] != "" and told["refused"] == "400 top_p"
