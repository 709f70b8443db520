"""Bounds against hostile clients: bodies, connections, heads, hosts and keys; probes are answered all the same."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest

from betoken.gateway import incomplete_bodies
from betoken.gateway.hosts import AllowedHosts
from betoken.gateway.incomplete_bodies import IncompleteBodies
from betoken.gateway.json_structure import JsonStructure
from betoken.v1 import generation_pb2 as pb
from tests.gateway.conftest import Gate, MakeGate, running_gateway
from tests.gateway.strict_router import Strict, before

BODY = {"prompt": "the", "max_tokens": 3}
JSON = {"content-type": "application/json"}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"


async def opened(gate: Gate, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gate.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def closed(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """Return the bytes before the gateway closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), within_s)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("path", "start", "entry"),
    [
        ("/v1/responses", '{"input": [', "{}"),
        ("/v1/chat/completions", '{"messages": [', '{"role": 1}'),
        ("/v1/completions", '{"prompt": "a", "stop_token_ids": [', '"a"'),
        ("/v1/completions", '{"prompt": "a", "stop": [', "1"),
        ("/v1/completions", '{"prompt": [1, ', '"a"'),
        ("/detokenize", '{"tokens": [', '"a"'),
    ],
)
async def test_a_body_of_a_million_invalid_entries_is_rejected_at_once(
    gate: Gate, path: str, start: str, entry: str
) -> None:
    body = (start + ",".join([entry] * 600_000) + "]}").encode()
    asked = asyncio.create_task(gate.http.post(path, content=body, headers=JSON))
    while not asked.done():
        async with asyncio.timeout(5):
            assert (await gate.http.get("/version")).status_code == 200
    assert (await asked).status_code in (400, 413)


@pytest.mark.parametrize("field", ["", "logit_bias", "betoken"])
async def test_a_body_of_many_invalid_fields_is_rejected_at_once(gate: Gate, field: str) -> None:
    wrong = {f"a{index}": [] for index in range(100_000)}
    body = BODY | (wrong if not field else {field: wrong})
    async with asyncio.timeout(10):
        assert (await gate.post("/v1/completions", body)).status_code == 400


def test_json_structure_is_counted_outside_strings_whatever_the_parts() -> None:
    text = json.dumps({"a": ['x,[{\\"', "\\", 1, {}], "b,": "\\\\"}).encode()
    for size in (1, 2, 3, 7, len(text)):
        structure = JsonStructure()
        for start in range(0, len(text), size):
            structure.feed(text[start : start + size])
        assert (structure.num_containers, structure.num_values) == (3, 4), size


async def test_a_key_is_checked_before_the_body_comes() -> None:
    async with before(Strict()) as gate:
        reader, writer = await opened(gate, HEAD % 3_000_000)
        assert b" 401 " in await closed(reader, 5)
        writer.close()


class NeedsKey(Strict):
    """A router with keys, and two workers whose addresses it keeps to itself."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        workers = [pb.WorkerInfo(state="ready"), pb.WorkerInfo(state="ready")]
        return pb.GetModelInfoResponse(model="m", verify_workers=workers, requires_api_key=True)


async def test_a_body_without_the_key_that_is_needed_is_not_read() -> None:
    async with before(NeedsKey()) as gate:
        reader, writer = await opened(gate, HEAD % 3_000_000)
        assert b" 401 " in await closed(reader, 5)
        writer.close()


async def test_metrics_of_workers_with_hidden_addresses_are_different_series() -> None:
    async with before(NeedsKey()) as gate:
        lines = (await gate.http.get("/metrics")).text.splitlines()
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert sum(line.startswith("betoken_worker_ready{") for line in lines) == 2


async def test_unfinished_bodies_are_no_requests_being_answered(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_requests": 2})
    writers = [(await opened(gate, HEAD % 9 + b"{"))[1] for _ in range(10)]
    await asyncio.sleep(0.1)
    assert (await gate.post("/v1/completions", BODY)).status_code == 200
    for writer in writers:
        writer.close()


async def test_too_many_unfinished_bodies_end_the_oldest(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_incomplete_bodies": 3})
    connections = []
    for _ in range(10):
        connections.append(await opened(gate, HEAD % 9 + b"{"))
        await asyncio.sleep(0.02)
    assert (await gate.post("/v1/completions", BODY)).status_code == 200
    answers = [await closed(reader, 5) for reader, _ in connections[:7]]
    assert all(b" 503 " in answer and b"retry-after" in answer for answer in answers)
    for _, writer in connections:
        writer.close()


async def test_incomplete_bodies_are_bounded_by_bytes_and_evicted_by_address() -> None:
    bodies = IncompleteBodies(max_bodies=10, max_bytes=100)
    ends: dict[str, str] = {}

    async def arrive(name: str, address: str, num_bytes: int) -> None:
        try:
            async with bodies.begin(address, 0.3) as body:
                body.received(num_bytes)
                await asyncio.sleep(5)
        except TimeoutError:
            ends[name] = "evicted" if body.is_evicted else "late"

    asked = [("honest", "1", 30), ("first", "2", 40), ("second", "2", 25), ("third", "2", 25)]
    await asyncio.gather(*(arrive(*each) for each in asked))
    assert ends == {"honest": "late", "first": "evicted", "second": "late", "third": "late"}
    assert bodies.num_bodies == bodies.num_bytes == 0


async def test_a_body_below_the_minimal_rate_is_not_waited_for(
    make_gate: MakeGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incomplete_bodies, "GRACE_S", 0.3)
    gate = await make_gate()
    reader, writer = await opened(gate, HEAD % 1000)
    status = asyncio.create_task(reader.readline())
    async with asyncio.timeout(5):
        while not status.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
    assert b" 408 " in status.result()
    writer.close()


@pytest.mark.parametrize(
    ("request_", "stray"),
    [(VERSION + b"\r\n", b"\r\n"), (VERSION + b"content-length: 9\r\n\r\n", b"a"), (VERSION + b"\r\n", b"GET /")],
)
async def test_stray_bytes_after_a_response_do_not_keep_the_connection(
    make_gate: MakeGate, request_: bytes, stray: bytes
) -> None:
    gate = await make_gate(gateway={"body_timeout_s": 0.5})
    reader, writer = await opened(gate, request_)
    assert b" 200 " in await reader.readuntil(b"}")
    writer.write(stray)
    await closed(reader, 3)
    writer.close()


async def test_more_idle_connections_than_allowed_close_the_oldest_and_probes_are_answered(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_idle_connections": 5})
    connections = [await opened(gate) for _ in range(20)]
    assert (await gate.http.get("/version")).status_code == 200
    for reader, _ in connections[:14]:
        await closed(reader, 3)
    for _, writer in connections:
        writer.close()


async def openapi_responses(gate: Gate) -> str:
    lines = (await gate.http.get("/metrics")).text.splitlines()
    return next((line for line in lines if "_duration_seconds_count{" in line and 'path="other"' in line), "")


async def test_an_unread_response_is_dropped(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_unread_s": 0.5})
    reader, writer = await opened(gate, (b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n") * 400)
    writer.transport.pause_reading()
    count, previous = await openapi_responses(gate), None
    while not count or count != previous:  # until the gateway waits for the reader
        await asyncio.sleep(1)
        previous, count = count, await openapi_responses(gate)
    writer.transport.resume_reading()
    assert (await closed(reader, 20)).count(b"HTTP/1.1 200") < 400
    writer.close()


async def test_a_long_header_has_the_status_431(gate: Gate) -> None:
    for name, length in (("authorization", 5000), ("authorization", 20_000), ("x-other", 20_000)):
        reply = await gate.post("/v1/completions", BODY, **{name: "a" * length})
        assert (reply.status_code, reply.json()["error"]["code"]) == (431, "header_too_large")
        assert name in reply.json()["error"]["message"]


async def test_a_host_that_is_not_allowed_reads_nothing(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"allowed_hosts": ("chat.example", "*.inner.example")})
    for host, status in (("evil.example", 403), ("chat.example:80", 200), ("a.inner.example", 200), ("[::1]:8", 200)):
        assert (await gate.http.get("/info", headers={"host": host})).status_code == status, host
    reply = await gate.post("/v1/completions", BODY, host="rebound.example")
    assert reply.status_code == 403 and "--allowed-hosts" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "is_allowed"),
    [("localhost", True), ("LOCALHOST:80", True), ("app.localhost", True), ("127.0.0.1:1", True), ("::1", True)]
    + [("", True), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("[evil]:1", False)]
    + [("a..b", False), ("@localhost", False), ("." * 8000, True)],
)
def test_addresses_are_allowed_hosts_without_an_option(header: str, is_allowed: bool) -> None:
    assert AllowedHosts(()).allows(header) is is_allowed
    assert AllowedHosts(("*",)).allows(header)


async def test_without_its_router_a_gateway_answers_probes_at_once_and_requests_with_retry_after() -> None:
    async with running_gateway(None, "127.0.0.1:9", max_outage_s=60.0) as gate:
        begin = time.monotonic()
        for path, status in (("/health", 503), ("/metrics", 200), ("/health", 503), ("/version", 200)):
            assert (await gate.http.get(path)).status_code == status
        assert time.monotonic() - begin < 30.0
    async with running_gateway(None, "127.0.0.1:9", max_outage_s=0.2) as gate:
        reply: httpx2.Response = await gate.post("/v1/completions", BODY)
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert "127.0.0.1" not in reply.text
        assert (await gate.http.get("/health")).headers["retry-after"] == "1"


async def test_remote_callers_read_no_addresses_of_workers(make_gate: MakeGate) -> None:
    gate = await make_gate()
    remote = {"x-forwarded-for": "203.0.113.5", "authorization": "Bearer any"}
    own, other = [(await gate.http.get("/info", headers=headers)).json() for headers in ({}, remote)]
    assert [worker["address"] for worker in other["workers"]] == ["1", "1"]
    assert all(":" in worker["address"] or "/" in worker["address"] for worker in own["workers"])
