"""Mutated bodies and headers: each is answered, or refused in OpenAI's form; nobody else's stream is disturbed."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest

from tests.gateway.conftest import Gate, MakeGate

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": ["the", "a"], "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "logprobs": 2}
        | {"stop": ["x"], "logit_bias": {"3": 1.5}, "stream": True, "stream_options": {"include_usage": True}}
        | {"betoken": {"drafter": "ngram", "drafter_settings": {"max_ngram": 3}, "provenance": True, "rounds": True}},
    ),
    ("/v1/completions", {"prompt": [3, 4], "max_tokens": 3, "echo": True, "stop_token_ids": [3], "user": "u"}),
    (
        "/v1/chat/completions",
        {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}}
        | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}], "max_completion_tokens": 3}
        | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto"},
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 3}
        | {"tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}}, "instructions": "b"},
    ),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}),
    ("/tokenize", {"prompt": "the", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
    0.1,
    -0.0,
    1e308,
    "",
    "a",
    "\x00",
    "\ud800",
]
JUNK += [
    "é" * 300,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    {"a": 1},
    ["a", 1],
    [1, 2, 3],
    "none",
    "text",
    [[1], "a"],
    float("nan"),
]
HEADERS = ["x-request-id", "traceparent", "authorization", "content-type", "accept", "origin"]
OTHER = {"prompt": "on the", "max_tokens": 40, "stream": True, "seed": 5, "temperature": 0.7}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        found += places(entry, (*path, key))
    return found


def mutated(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    path, seed = chance.choice(SEEDS)
    body: Any = copy.deepcopy(seed)
    for _ in range(chance.randint(1, 3)):
        *above, last = chance.choice(places(body)[1:] or [("prompt",)])
        inner = body
        for key in above:
            inner = inner[key]
        kind = chance.random()
        if kind < 0.2 and isinstance(inner, dict):
            inner.pop(last, None)
        elif kind < 0.3 and isinstance(inner, dict):
            inner[chance.choice(["", "n", "tools", "best_of", "suffix", "é", "model", "stream"])] = chance.choice(JUNK)
        else:
            inner[last] = copy.deepcopy(chance.choice(JUNK))
    data = json.dumps(body).encode()
    if chance.random() < 0.15:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + chance.randint(0, 2) :]
    headers = {"content-type": "application/json"}
    if chance.random() < 0.2:
        headers[chance.choice(HEADERS)] = "".join(chance.choices("az09 -_;=/é", k=chance.randint(0, 40))).strip()
    return path, data, headers


async def bombard(gate: Gate, num: int, chance: random.Random) -> dict[int, int]:
    """Statuses of so many mutants, by how many have them."""
    statuses: dict[int, int] = {}

    async def one() -> None:
        path, data, headers = mutated(chance)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        reply = await gate.http.post(path, content=data, headers=raw)
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        told = reply.text
        assert reply.status_code < 500 and reply.status_code != 499, (path, data, headers, told)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"], (path, data, told)
        elif reply.headers["content-type"].startswith("text/event-stream"):
            end = told.rstrip().rpartition("\n\n")[2]
            assert end == "data: [DONE]" or end.startswith("event: response."), (path, data, told)

    for _ in range(num // 20):
        await asyncio.gather(*(one() for _ in range(20)))
    return statuses


async def others(gate: Gate, stop: asyncio.Event) -> int:
    """Asks for one answer again and again, which is always the same; how often."""
    expected, count = None, 0
    while not stop.is_set():
        text = ""
        stream = await gate.openai.completions.create(model="fake", **OTHER)  # type: ignore[call-overload]
        async for event in stream:
            text += event.choices[0].text
        expected = expected or text
        assert text == expected
        count += 1
    return count


async def fuzzed(make_gate: MakeGate, num: int, seed: int) -> dict[int, int]:
    gate, stop = await make_gate(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        undisturbed = tasks.create_task(others(gate, stop))
        statuses = await bombard(gate, num, random.Random(seed))
        stop.set()
    assert undisturbed.result() > 0
    await gate.cluster.until_idle()
    return statuses


async def test_mutated_requests_are_answered_or_refused(make_gate: MakeGate) -> None:
    statuses = await fuzzed(make_gate, 600, 1)
    assert statuses[200] > 20 and statuses[400] > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_very_many_mutated_requests_are_answered_or_refused(make_gate: MakeGate) -> None:
    assert sum((await fuzzed(make_gate, 100_000, 2)).values()) == 100_000


async def test_many_connections_against_small_limits_are_answered_or_refused(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_requests": 20, "body_timeout_s": 2.0}, step_s=0.001)
    host, port = gate.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "the", "max_tokens": 20, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    whole = head + f"content-length: {len(body)}\r\n\r\n".encode() + body

    async def one(index: int) -> str:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(whole if index % 3 else whole[: len(whole) - index % 30 - 1])
            answer = bytearray()
            while part := await asyncio.wait_for(reader.read(64), 60):  # slowly
                answer += part
            return answer.decode()
        finally:
            writer.close()

    answers = await asyncio.gather(*(one(index) for index in range(300)))
    kinds = {answer.split(" ", 2)[1] for answer in answers if answer}
    assert kinds == {"200", "503", "408"}
    for answer in answers:
        if answer.startswith("HTTP/1.1 200"):
            assert "data: [DONE]" in answer
        elif answer:
            assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]
    assert sum(not answer for answer in answers) <= 100  # half a head, closed without a word
    await gate.cluster.until_idle()
    assert (await gate.post("/v1/completions", {"prompt": "the"})).status_code == 200
