"""Requests too large or undecodable end with a typed error and disturb no other call."""

import asyncio

import grpc
import pytest

from betoken.common.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    from_rpc_error,
)
from betoken.rpc.server import Service
from betoken.rpc.servicing import typed_errors
from betoken.rpc.settings import ServiceSettings
from betoken.v1 import generation_pb2_grpc
from betoken.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GenerateTokens,
    TokenizeRequest,
    TokenizeResponse,
)
from tests.rpc.harness import NAME, Running


async def test_an_oversized_message_is_a_typed_error():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(max_message_bytes=1 << 16))
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                await stub.Tokenize(TokenizeRequest(prompt="x" * 100_000), timeout=30)
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError)
        assert "65536" in str(error)
        running.stop.set()


class TypedServicer(generation_pb2_grpc.GenerationServiceServicer):
    async def Tokenize(self, request, context):
        async with typed_errors(context):
            return TokenizeResponse(ids=[len(request.prompt)])

    async def Generate(self, request, context):
        async with typed_errors(context):
            yield GenerateResponse(tokens=GenerateTokens(text=request.prompt))


@pytest.mark.parametrize(
    ("method", "data", "text"),
    [
        ("Tokenize", b"\x0a\x02\xff\xfe", "prompt = b'\\xff': must be valid UTF-8"),
        ("Generate", b"\x2a\x04\x62\x02\xff\xfe", "sampling.stop[0] = b'\\xff': must be valid UTF-8"),
        ("Generate", b"\x0a\xff", "request = 2 undecodable bytes: must be a betoken.v1.GenerateRequest"),
        pytest.param(  # a look at millions would hold up everyone for seconds
            "Generate",
            b"\x18\x00" * 100_000 + b"\x0a\x01\xff",
            "request = more fields: must be at most 65536 fields, numbers of a list packed",
            id="too-many-fields-to-look-through",
        ),
    ],
)
async def test_undecodable_requests_are_typed_errors_and_disturb_no_other_call(method, data, text):
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(), [Service(NAME, TypedServicer(), add)])
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            kind = channel.unary_unary if method == "Tokenize" else channel.unary_stream
            call = kind(f"/{NAME}/{method}", request_serializer=bytes, response_deserializer=bytes)(data, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if method == "Tokenize" else call.read())
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgumentError)
            assert str(error) == text
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert list((await stub.Tokenize(TokenizeRequest(prompt="abc"))).ids) == [3]
            assert [reply.tokens.text async for reply in stub.Generate(GenerateRequest(prompt="a"))] == ["a"]
        running.stop.set()
