"""Addresses, proxies, headers and keys of a client's channel."""

import socket
from typing import Any

import grpc
import pytest

from betoken.client import (
    AsyncClient,
    Client,
    InvalidArgumentError,
    RetryPolicy,
    UnavailableError,
)
from betoken.client.channel import channel_options
from betoken.v1 import generation_pb2 as pb


async def test_an_unreachable_router_is_unavailable(runner) -> None:
    with pytest.raises(UnavailableError, match="nothing listens at 127.0.0.1:1"):
        await runner.call("127.0.0.1:1", "model_info", retry=RetryPolicy(max_retries=1, initial_backoff_s=0.001))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:65537", "http://localhost:50051", "dns:///", "\udcff:1", None]
)
def test_an_invalid_address_is_rejected_and_not_dialled(kind: Any, address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"address = .*: must be HOST:PORT"):
        kind(address)


@pytest.mark.parametrize("scheme", ["dns:///", "ipv4:"])
async def test_grpcs_own_schemes_are_addresses_too(router, runner, scheme) -> None:
    router.will(pb.GetModelInfoResponse(model="tiny"))
    assert (await runner.call(f"{scheme}{router.address}", "model_info")).model == "tiny"


async def test_a_router_of_this_machine_is_not_sought_behind_a_proxy(router, runner, monkeypatch) -> None:
    monkeypatch.delenv("no_grpc_proxy")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    router.will(pb.GetModelInfoResponse(model="tiny"))
    assert (await runner.call(router.address, "model_info", retry=RetryPolicy(max_retries=0))).model == "tiny"


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("ipv4:127.0.0.2:50051", True),
        ("ipv6:[::1]:50051", True),
        ("LOCALHOST:50051", True),
        ("0.0.0.0:50051", True),
        ("[::ffff:127.0.0.1]:50051", True),
        ("localhost.:50051", True),
        ("router.localhost:50051", True),
        ("localhost.localdomain:50051", True),
        ("ipv4:198.51.100.7:50051,127.0.0.1:50051", True),  # gRPC would ask the proxy for a host of that name
        ("ipv6:[2001:db8::7]:50051,[2001:db8::8]:50051", True),
        ("unix-abstract:router", True),
        ("router.example:50051", False),
        ("198.51.100.7:50051", False),
        ("dns:///localhost.example:50051", False),
    ],
)
def test_addresses_of_other_machines_may_be_behind_a_proxy(address, is_own) -> None:
    assert (("grpc.enable_http_proxy", 0) in channel_options(address, None)) is is_own


@pytest.mark.parametrize(("family", "other"), [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")])
def test_network_addresses_of_this_machine_are_not_sought_behind_a_proxy(family: int, other: str) -> None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 1))
            own = probe.getsockname()[0]
    except OSError:
        pytest.skip("needs a network")
    assert ("grpc.enable_http_proxy", 0) in channel_options(f"[{own}]:50051" if ":" in own else f"{own}:50051", None)


def test_the_host_name_of_this_machine_is_not_sought_behind_a_proxy() -> None:
    assert ("grpc.enable_http_proxy", 0) in channel_options(f"dns:///{socket.gethostname()}:50051", None)


@pytest.mark.parametrize(
    ("own", "address", "place", "is_own"),
    [
        ("box", "box.corp.example:50051", "127.0.1.1", True),
        ("box", "dns:///BOX.corp.example.:50051", "127.0.1.1", True),
        ("box.corp.example", "box:50051", "127.0.1.1", True),
        ("box", "box.elsewhere.example:50051", "198.51.100.7", False),
        ("box", "box.elsewhere.example:50051", None, False),
        ("box", "boxer:50051", "127.0.1.1", False),  # not looked up
    ],
)
def test_the_full_host_name_of_this_machine_is_not_sought_behind_a_proxy(
    monkeypatch, own, address, place, is_own
) -> None:
    def look_up(host: str, port: None, **kinds: object) -> list[Any]:
        if place is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert (("grpc.enable_http_proxy", 0) in channel_options(address, None)) is is_own


async def test_the_callers_headers_go_with_every_call_and_every_attempt(router, script, runner) -> None:
    headers = {"authorization": "Bearer k"}
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(), script.finish())
    await runner.call(router.address, "complete", "hi", headers=headers)
    router.will(pb.TokenizeResponse(ids=[1]))
    await runner.call(router.address, "tokenize", "hi", headers=headers)
    assert [got.get("authorization") for got in router.metadata] == ["Bearer k"] * 3


@pytest.mark.parametrize("source", ["argument", "environment"])
async def test_an_api_key_goes_with_every_call_unless_a_call_names_another(
    router, script, runner, monkeypatch, source: str
) -> None:
    options = {"api_key": "k"} if source == "argument" else {}
    monkeypatch.setenv("BETOKEN_API_KEY", "k" if source == "environment" else "another")
    router.will(script.start(), script.finish())
    await runner.call(router.address, "complete", "hi", client_options=options)
    for headers in (None, {"authorization": "Bearer own"}):
        router.will(pb.TokenizeResponse(ids=[1]))
        await runner.call(router.address, "tokenize", "hi", client_options=options, headers=headers)
    assert [got.get("authorization") for got in router.metadata] == ["Bearer k", "Bearer k", "Bearer own"]


async def test_an_empty_api_key_is_none_whatever_the_environment_says(router, runner, monkeypatch) -> None:
    monkeypatch.setenv("BETOKEN_API_KEY", "k")
    router.will(pb.TokenizeResponse(ids=[1]))
    await runner.call(router.address, "tokenize", "hi", client_options={"api_key": ""})
    assert "authorization" not in router.metadata[0]


@pytest.mark.parametrize("key", ["secret key", "sécret", "secret\n", "s" * 513, 4711])
@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_a_key_that_no_header_holds_is_refused_and_not_quoted(client_class, key) -> None:
    with pytest.raises(InvalidArgumentError, match="api_key") as refused:
        client_class("127.0.0.1:1", api_key=key)
    assert str(key) not in str(refused.value)


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "k"}, {"grpc-timeout": "1S"}, {"x-bin": "k"}, {"x": "é"}, {"x": "a\nb"}, {"x": 1}, "x"],
)
async def test_headers_that_grpc_does_not_send_are_refused_by_name(router, runner, headers) -> None:
    with pytest.raises(InvalidArgumentError, match="headers"):
        await runner.call(router.address, "complete", "hi", headers=headers)


async def test_the_callers_trace_travels_along(router, script, runner) -> None:
    from opentelemetry import context, trace

    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)))
    token = context.attach(trace.set_span_in_context(span))
    try:
        router.will(script.start(), script.finish())
        await runner.call(router.address, "complete", "hi")
    finally:
        context.detach(token)
    assert router.metadata[0]["traceparent"].split("-")[1] == f"{0xABC:032x}"
