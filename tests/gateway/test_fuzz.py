"""Mutated bodies and headers: each is answered, or rejected in OpenAI's format; no other stream is disturbed."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from betoken.bench.fuzz.http_campaign import fuzz_http
from tests.gateway.conftest import Gate, MakeGate

KEEPS, PREDICTS = [{"supports_constraints": True, "max_context": 256}], [{"predicting_drafters": ["ngram"]}]
OTHER = {"prompt": "on the", "max_tokens": 40, "stream": True, "seed": 5, "temperature": 0.7}


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
    gate, stop = await make_gate({"body_timeout_s": 0.5}, verify_hellos=KEEPS, draft_hellos=PREDICTS), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        undisturbed = tasks.create_task(others(gate, stop))
        host, port = gate.url.removeprefix("http://").split(":")
        statuses = await fuzz_http(host, int(port), num, random.Random(seed), gate.cluster.until_idle)
        stop.set()
    assert undisturbed.result() > 0
    await gate.cluster.until_idle()
    return statuses


async def test_mutated_requests_are_answered_or_refused(make_gate: MakeGate) -> None:
    statuses = await fuzzed(make_gate, 600, 1)
    assert statuses[200] > 20 and statuses[400] > 100


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_very_many_mutated_requests_are_answered_or_refused(make_gate: MakeGate, record_property: Any) -> None:
    statuses = await fuzzed(make_gate, 100_000, 2)
    record_property("statuses", statuses)
    assert sum(statuses.values()) == 100_000


async def test_many_connections_against_small_limits_are_answered_or_refused(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_requests": 20, "body_timeout_s": 2.0}, step_s=0.001)
    host, port = gate.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "the", "max_tokens": 20, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
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
