"""Every request has an id, a trace, its caller's key and limits, and ends when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from betoken.common.errors import (
    BetokenError,
    InvalidArgumentError,
    LoadingError,
    ResourceExhaustedError,
    UnavailableError,
)
from betoken.v1 import generation_pb2 as pb
from tests.gateway.conftest import Gate, MakeGate
from tests.gateway.strict_router import Strict, before

BODY = {"prompt": "the", "max_tokens": 8}


async def test_a_request_keeps_the_id_that_it_brings_or_gets_one(gate: Gate) -> None:
    brought = await gate.post("/v1/completions", BODY, **{"x-request-id": "mine-1"})
    assert brought.headers["x-request-id"] == "mine-1" and brought.json()["id"] == "cmpl-mine-1"
    ids = [(await gate.post("/v1/completions", body)).headers["x-request-id"] for body in (BODY, BODY, {"n": 0})]
    assert len(set(ids)) == 3
    odd = await gate.http.get("/version", headers={"x-request-id": "a b\tc"})
    assert odd.headers["x-request-id"] != "a b\tc"


@pytest.mark.parametrize("body", [BODY | {"max_tokens": 1500}, BODY | {"max_tokens": 1500, "stream": True, "n": 2}])
async def test_a_client_that_leaves_frees_its_pages(make_gate: MakeGate, body: dict[str, Any]) -> None:
    gate = await make_gate(step_s=0.02)
    asking = asyncio.create_task(gate.post("/v1/completions", body))
    await gate.cluster.until(lambda: gate.cluster.verifiers[0].num_open == body.get("n", 1))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await gate.cluster.until(lambda: not gate.cluster.verifiers[0].num_open, within_s=5)
    await gate.cluster.until_idle()
    assert (await gate.post("/v1/completions", BODY)).status_code == 200


async def test_requests_beyond_the_limit_get_a_retry_delay(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"max_requests": 2}, step_s=0.02)
    long = [asyncio.create_task(gate.post("/v1/completions", BODY | {"max_tokens": 1500})) for _ in range(2)]
    await gate.cluster.until(lambda: gate.cluster.verifiers[0].num_open == 2)
    refused = await gate.post("/v1/completions", BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert (await gate.http.get("/health")).status_code == 200
    for asking in long:
        asking.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    await gate.cluster.until_idle()
    assert (await gate.post("/v1/completions", BODY)).status_code == 200


@pytest.fixture
async def strict() -> AsyncIterator[tuple[Strict, Gate]]:
    servicer = Strict()
    async with before(servicer) as gate:
        yield servicer, gate


class Loading(Strict):
    """A router whose verify worker packs its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.error = LoadingError("packing weights", 0.43)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not request.at_once:
            await self._fail(context)
        worker = pb.WorkerInfo(state="loading", detail="packing weights", loading_fraction=0.43)
        return pb.GetModelInfoResponse(verify_workers=[worker])


async def test_a_loading_model_is_unavailable_with_its_stage_and_a_retry_delay() -> None:
    async with before(Loading()) as gate:
        replies = [await gate.http.get(path) for path in ("/health", "/info", "/v1/models")]
        replies.append(await gate.post("/v1/completions", BODY))
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], reply.headers["retry-after"]) == (503, "loading", "3")
        assert error["message"] == "the model is loading: packing weights (43%)"


async def test_the_callers_key_is_the_routers_to_check(strict: tuple[Strict, Gate]) -> None:
    router, gate = strict
    reply = await gate.post("/v1/completions", BODY, authorization="Bearer k")
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert "not known" in error["message"]
    assert (await gate.http.get("/v1/models", headers={"authorization": "Bearer m"})).status_code == 401
    assert [got["authorization"] for got in router.metadata] == ["Bearer k", "Bearer m"]
    headers = httpx2.Headers([(b"authorization", b"Bearer \xe9")])
    assert (await gate.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 401
    assert len(router.metadata) == 2


async def test_a_limit_of_the_router_has_a_retry_after_header(strict: tuple[Strict, Gate]) -> None:
    router, gate = strict
    router.error = ResourceExhaustedError("too many requests", retry_after_s=1.25)
    reply = await gate.post("/v1/completions", BODY)
    assert reply.status_code == 429 and reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("2", "1250")


async def test_a_trace_continues_through_the_gateway(strict: tuple[Strict, Gate]) -> None:
    router, gate = strict
    traceparent = f"00-{0xABC:032x}-{0xDEF:016x}-01"
    await gate.post("/v1/completions", BODY, traceparent=traceparent)
    await gate.post("/v1/completions", BODY)
    assert router.metadata[0]["traceparent"].split("-")[1] == f"{0xABC:032x}"
    assert "traceparent" not in router.metadata[1]


@pytest.mark.parametrize(
    ("code", "status"),
    [("INTERNAL", 500), ("UNAVAILABLE", 503), ("DEADLINE_EXCEEDED", 504), ("PERMISSION_DENIED", 403)]
    + [("FAILED_PRECONDITION", 409), ("NOT_FOUND", 404), ("UNIMPLEMENTED", 501), ("INVALID_ARGUMENT", 400)],
)
async def test_every_grpc_status_of_the_router_has_an_http_status(
    strict: tuple[Strict, Gate], code: str, status: int
) -> None:
    router, gate = strict
    kind: Any = next(kind for kind in BetokenError.__subclasses__() if kind.code.name == code)
    router.error = kind("model", "x", "must be y") if code == "INVALID_ARGUMENT" else kind("why")
    reply = await gate.post("/v1/completions", BODY)
    assert reply.status_code == status and reply.json()["error"]["message"]


async def test_a_broken_event_stream_ends_with_the_error_and_without_done(strict: tuple[Strict, Gate]) -> None:
    router, gate = strict
    start = pb.GenerateStart(seed=1, prompt_ids=[1], model="m")
    tokens = pb.GenerateTokens(tokens=[pb.GeneratedToken(id=5, num_chars=1)], text="a")
    router.steps = [pb.GenerateResponse(start=start), pb.GenerateResponse(tokens=tokens)]
    router.error = ResourceExhaustedError("out of pages")
    reply = await gate.post("/v1/completions", BODY | {"stream": True})
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert reply.status_code == 200 and "[DONE]" not in events
    assert json.loads(events[0])["choices"][0]["text"] == "a"
    assert json.loads(events[-1])["error"]["message"] == "out of pages"


class Late(Strict):
    """A router that refuses one prompt after it has answered another."""

    def __init__(self) -> None:
        super().__init__()
        self.error = InvalidArgumentError("prompt", "refused", "must be another")
        self.has_answered = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if request.prompt == "refused":
            await self.has_answered.wait()
            await self._fail(context)
        tokens = pb.GenerateTokens(tokens=[pb.GeneratedToken(id=5, num_chars=1)], text="a")
        yield pb.GenerateResponse(start=pb.GenerateStart(seed=1, prompt_ids=[1], model="m"))
        yield pb.GenerateResponse(tokens=tokens)
        yield pb.GenerateResponse(finish=pb.GenerateFinish(reason=pb.FINISH_REASON_LENGTH))
        self.has_answered.set()


async def test_a_prompt_rejected_late_has_its_http_status_though_another_is_answered() -> None:
    async with before(Late()) as gate:
        reply = await gate.post("/v1/completions", BODY | {"stream": True, "prompt": ["the", "refused"]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
        reply = await gate.post("/v1/completions", BODY | {"stream": True, "prompt": ["the", "an"]})
        assert reply.status_code == 200 and reply.text.count('"text":"a"') == 2 and "[DONE]" in reply.text


async def test_health_of_the_gateway_is_the_routers(strict: tuple[Strict, Gate]) -> None:
    router, gate = strict
    assert (await gate.http.get("/health")).status_code == 200  # it wants a key, so it lives
    router.error = UnavailableError("no verify worker")
    assert (await gate.http.get("/health")).status_code == 503
    assert (await gate.http.get("/version")).status_code == 200
