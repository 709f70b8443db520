"""The error table: every class survives the trip over a real server, sync and async, and over a link entry."""

import asyncio
import copy
import pickle

import grpc
import pytest

from betoken.common.errors import (
    ERROR_BY_STATUS,
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LoadingError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    from_link_error,
    from_rpc_error,
    from_status,
    to_link_error,
    to_status,
)
from betoken.rpc.servicing import typed_errors
from betoken.v1 import generation_pb2_grpc
from betoken.v1.generation_pb2 import GenerateRequest, GenerateResponse, TokenizeRequest
from betoken.v1.types_pb2 import LinkError

ERRORS = [
    InvalidArgumentError("sampling.temperature", -1.0, "must be 0 to 100"),
    InvalidArgumentError("prompt", "größer: äöü = 3", "must be so: and so"),
    NotFoundError("model = x: this router serves y"),
    FailedPreconditionError("tokenizers differ"),
    ResourceExhaustedError("the queue of 8 is full", retry_after_s=1.25),
    ResourceExhaustedError("too large"),
    UnavailableError("gone\nfor good"),
    DeadlineExceededError("after 3 s"),
    RequestCancelledError("by its caller"),
    PermissionDeniedError("not you"),
    UnauthenticatedError("who?"),
    UnimplementedError("later"),
    InternalError("oops", request_id="abc"),
]
"""Faults of calls, and of sequences."""
OF_CALLS = [*ERRORS, LoadingError("packing weights", 0.43)]


def facts(error: BetokenError) -> dict[str, object]:
    return {"type": type(error), "text": str(error), **vars(error)}


@pytest.mark.parametrize("error", OF_CALLS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle_and_copy(error: BetokenError) -> None:
    """A process pool hangs at an error that cannot be pickled."""
    assert facts(pickle.loads(pickle.dumps(error))) == facts(copy.copy(error)) == facts(error)


class FailingServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def Tokenize(self, request, context):
        async with typed_errors(context, "req-1"):
            raise self.error

    async def Generate(self, request, context):
        async with typed_errors(context, "req-1"):
            yield GenerateResponse()
            raise self.error


async def serve_failing(stack, error: BaseException) -> str:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(FailingServicer(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"127.0.0.1:{port}"


async def unary_error(address: str) -> BetokenError:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(TokenizeRequest(), timeout=5)
    return from_rpc_error(caught.value)


async def stream_error(address: str) -> BetokenError:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generation_pb2_grpc.GenerationServiceStub(channel).Generate(GenerateRequest(), timeout=5):
                pass
    return from_rpc_error(caught.value)


def sync_error(address: str) -> BetokenError:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(TokenizeRequest(), timeout=5)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("error", OF_CALLS, ids=lambda error: type(error).__name__)
async def test_an_error_survives_a_call_of_a_server(stack, error):
    address = await serve_failing(stack, error)
    expected = facts(error) | {"request_id": error.request_id or "req-1"}
    assert facts(await unary_error(address)) == expected
    assert facts(await stream_error(address)) == expected
    assert facts(await asyncio.to_thread(sync_error, address)) == expected


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_a_link_entry(error):
    entry = to_link_error(error, 7)
    assert entry.sequence_id == 7
    back = from_link_error(LinkError.FromString(entry.SerializeToString()))
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_a_link_entry_keeps_field_value_and_limit():
    back = from_link_error(to_link_error(InvalidArgumentError("block.draft_ids[3]", 99, "must be below 64"), 7))
    assert (back.field, back.value, back.limit) == ("block.draft_ids[3]", "99", "must be below 64")


@pytest.mark.parametrize(
    ("error", "level", "text"),
    [
        (InternalError("the forward failed"), "ERROR", "request req-1 failed: the forward failed"),
        (UnavailableError("no worker"), "DEBUG", "request req-1 ends: no worker"),
        (InvalidArgumentError("prompt", "secret", "must be shorter"), "DEBUG", "request req-1 ends INVALID_ARGUMENT"),
    ],
)
async def test_the_log_has_the_id_that_a_failed_requests_client_is_given(stack, caplog, error, level, text):
    caplog.set_level("DEBUG", "betoken")
    await unary_error(await serve_failing(stack, error))
    records = [record for record in caplog.records if record.name.startswith("betoken.")]
    assert [(record.levelname, record.getMessage()) for record in records] == [(level, text)]


class Panic(BaseException):
    """A foreign library's error outside `Exception`: gRPC would never end the call."""


@pytest.mark.parametrize(
    "unknown",
    [ValueError("secret"), Panic("secret"), BaseExceptionGroup("secret", [Panic()])],
    ids=lambda error: type(error).__name__,
)
async def test_an_unknown_exception_is_opaque_and_logged(stack, caplog, unknown):
    error = await unary_error(await serve_failing(stack, unknown))
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    assert error.request_id == "req-1"
    assert "request req-1 failed" in caplog.text
    assert "secret" in caplog.text


async def test_abort_inside_the_helper_keeps_its_own_status(stack):
    class Aborting(FailingServicer):
        async def Tokenize(self, request, context):
            async with typed_errors(context):
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")

    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Aborting(ValueError()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    error = await unary_error(f"127.0.0.1:{port}")
    assert isinstance(error, FailedPreconditionError)
    assert str(error) == "mine"


def test_every_status_but_ok_has_a_class_and_every_class_its_own_status():
    assert set(ERROR_BY_STATUS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}
    for cls in set(ERROR_BY_STATUS.values()):
        assert ERROR_BY_STATUS[cls.code] is cls


def test_a_status_of_another_server_becomes_an_error_without_metadata():
    error = from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", None)
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_s is None
    assert from_status(grpc.StatusCode.INVALID_ARGUMENT, "bad thing", ()).limit == "bad thing"
    assert str(from_status(grpc.StatusCode.UNAVAILABLE, "")) == "UNAVAILABLE"
    assert isinstance(from_link_error(LinkError(code=99, message="?")), InternalError)


def test_huge_and_unencodable_error_texts_fit_into_trailers():
    error = InvalidArgumentError("prompt", "\ud800" + "x" * 100_000, "must be valid UTF-8")
    _, details, metadata = to_status(error)
    assert len(details) <= 1024
    assert sum(len(value) for _, value in metadata) < 2048
    assert "\\ud800" in details


@pytest.mark.parametrize("character", ["x", "\n", "é", "漢", "😀"])
async def test_a_long_text_of_any_script_keeps_its_error(stack, character):
    address = await serve_failing(stack, InvalidArgumentError("messages", character * 200, character * 2000))
    error = await unary_error(address)
    assert isinstance(error, InvalidArgumentError) and error.field == "messages"
    assert error.limit.startswith(character * 100) and error.limit.endswith("...")


async def test_a_call_that_has_ended_is_left_to_grpc_to_cancel():
    """Whatever is sent after a deadline fails, and a handler that fails then is logged with a traceback."""

    async def handle() -> None:
        async with typed_errors(None):
            raise grpc.aio.BaseError  # as its ExecuteBatchError, which has no public name

    handling = asyncio.ensure_future(handle())
    done, _ = await asyncio.wait({handling}, timeout=0.2)
    assert not done
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
