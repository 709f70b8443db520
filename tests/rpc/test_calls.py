"""Abandoned calls of unknown clients do not block others: calls without a message, unread ends, watches, bursts."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.common.errors import ResourceExhaustedError, UnavailableError, from_rpc_error
from betoken.rpc import calls, server
from betoken.rpc.health import HealthServicer
from betoken.rpc.server import Service, serve
from betoken.rpc.servicing import typed_errors
from betoken.rpc.settings import ServiceSettings
from betoken.v1 import generation_pb2_grpc
from betoken.v1.generation_pb2 import TokenizeRequest, TokenizeResponse
from tests.raw_http2 import RawConnection

NAME = "betoken.v1.GenerationService"
TOKENIZE, GENERATE = f"/{NAME}/Tokenize", f"/{NAME}/Generate"
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(generation_pb2_grpc.GenerationServiceServicer):
    """Tokenize answers at once, or when released if the prompt requests it, or fails."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.num_held = 0

    async def Tokenize(self, request, context):
        async with typed_errors(context):
            if request.prompt == "fail":
                raise UnavailableError("as asked")
            if request.prompt == "hold":
                self.num_held += 1
                await self.released.wait()
            return TokenizeResponse(ids=[1])

    async def Generate(self, request, context):
        await self.released.wait()


@asynccontextmanager
async def serving(**settings):
    """A server's address and servicer."""
    servicer, stop = Servicer(), asyncio.Event()
    port = asyncio.get_running_loop().create_future()
    service = Service(NAME, servicer, generation_pb2_grpc.add_GenerationServiceServicer_to_server)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        options = ServiceSettings(drain_grace_s=0.1, **settings)
        tasks.create_task(serve([service], options, stop=stop, on_ready=port.set_result))
        try:
            yield f"127.0.0.1:{await port}", servicer
        finally:
            stop.set()


@asynccontextmanager
async def client(address):
    async with grpc.aio.insecure_channel(address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_abandoned_calls_do_not_block_others():
    """More calls of each kind than are served concurrently, on separate connections."""
    async with serving(max_concurrent_rpcs=256, max_connection_streams=200) as (address, _), AsyncExitStack() as stack:
        for method, message in (
            (WATCH, health_pb2.HealthCheckRequest()),
            (WATCH, None),
            (REFLECT, None),
            (GENERATE, None),
            (TOKENIZE, None),
            (CHECK, None),
        ):
            for _ in range(2):
                connection = await stack.enter_async_context(RawConnection(address, window=0))
                for _ in range(200):
                    connection.call(method, message)
                await connection.drain()
            await asyncio.sleep(0.2)
            async with client(address) as (service, health):
                for name in ("", NAME):
                    assert (
                        await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
                    ).status == SERVING
                assert (await service.Tokenize(TokenizeRequest(), timeout=10)).ids == [1], method


async def test_messages_of_a_call_may_come_well_after_their_headers():
    async with serving(max_concurrent_rpcs=100) as (address, _), RawConnection(address, window=1000) as slow:
        streams = {slow.call(TOKENIZE) for _ in range(100)}
        await slow.drain()
        await asyncio.sleep(0.3)
        for stream in streams:
            slow.send(stream, TokenizeRequest())
        await until(lambda: streams <= slow.ended)
        assert all(len(slow.messages(stream)) == 1 for stream in streams)


async def test_a_call_whose_message_does_not_come_ends(monkeypatch):
    monkeypatch.setattr(calls, "_SWEEP_S", 0.05)
    monkeypatch.setattr(server, "CallLimits", lambda *options: calls.CallLimits(*options, first_message_s=0.2))
    async with serving() as (address, servicer), RawConnection(address) as stranger:
        streams = {stranger.call(method) for method in (GENERATE, TOKENIZE, REFLECT, CHECK)}
        async with client(address) as (service, _):
            held = asyncio.ensure_future(service.Tokenize(TokenizeRequest(prompt="hold")))
            await until(lambda: servicer.num_held)
            while not streams <= stranger.ended:
                await service.Tokenize(TokenizeRequest())
                await asyncio.sleep(0.02)
            servicer.released.set()  # a call that has its message is not cut
            assert (await held).ids == [1]


@pytest.mark.parametrize("prompt", ["", "fail"])
async def test_the_unread_end_of_a_call_is_dropped(monkeypatch, prompt):
    monkeypatch.setattr(calls, "_SWEEP_S", 0.05)
    async with serving(max_unread_s=0.2) as (address, _), RawConnection(address, window=0) as stranger:
        message = TokenizeRequest(prompt=prompt)
        streams = {stranger.call(TOKENIZE, message) for _ in range(20)}
        streams |= {stranger.call(CHECK, health_pb2.HealthCheckRequest()) for _ in range(20)}
        async with client(address) as (service, _):
            while not streams <= stranger.ended:
                await service.Tokenize(TokenizeRequest())
                await asyncio.sleep(0.02)


async def test_overload_is_refused_with_advice_and_health_is_reported():
    async with serving(max_concurrent_rpcs=2) as (address, servicer), client(address) as (service, health):
        held = [asyncio.ensure_future(service.Tokenize(TokenizeRequest(prompt="hold"))) for _ in range(2)]
        await until(lambda: servicer.num_held == 2)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await service.Tokenize(TokenizeRequest(), timeout=10)
        error = from_rpc_error(failed.value)
        assert isinstance(error, ResourceExhaustedError) and error.retry_after_s
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == SERVING
        servicer.released.set()
        assert [(await call).ids for call in held] == [[1], [1]]
        assert (await service.Tokenize(TokenizeRequest(), timeout=10)).ids == [1]


async def test_a_burst_of_calls_ends_in_answers_or_retry_advice():
    """gRPC alone cancels some of what comes faster than it is looked at."""
    outcomes: Counter[object] = Counter()

    async def ask(service):
        try:
            outcomes[len((await service.Tokenize(TokenizeRequest(prompt="hold"), timeout=60)).ids)] += 1
        except grpc.aio.AioRpcError as failed:
            outcomes[(failed.code(), getattr(from_rpc_error(failed), "retry_after_s", None) is not None)] += 1

    async with serving(max_concurrent_rpcs=2000) as (address, servicer), AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]  # separate connections
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address, options)) for _ in range(4)]
        services = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        asking = [asyncio.ensure_future(ask(services[number % 4])) for number in range(2200)]
        await until(lambda: servicer.num_held + outcomes.total() == 2200)
        servicer.released.set()
        await asyncio.gather(*asking)
    assert set(outcomes) <= {1, (grpc.StatusCode.RESOURCE_EXHAUSTED, True)}, outcomes
    assert outcomes[1] >= 2000


async def test_connections_are_bounded():
    async with serving(max_connections=3) as (address, _), AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(RawConnection(address)) for _ in range(3)]
        streams = [each.call(TOKENIZE, TokenizeRequest()) for each in connections]
        await until(lambda: all(stream in each.answered for stream, each in zip(streams, connections, strict=True)))
        extra = await stack.enter_async_context(RawConnection(address))
        await until(lambda: extra.is_closed)
        await connections[0].close()
        while True:  # until the server has seen it
            async with RawConnection(address) as another:
                stream = another.call(TOKENIZE, TokenizeRequest())
                await until(lambda: another.is_closed or stream in another.answered)  # noqa: B023
                if stream in another.answered:
                    break


async def test_a_health_watcher_that_does_not_read_blocks_neither_others_nor_the_shutdown(monkeypatch):
    is_available, stop = True, asyncio.Event()
    port = asyncio.get_running_loop().create_future()
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    service = Service(NAME, Servicer(), add, is_available=lambda: is_available)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        options = ServiceSettings(drain_grace_s=0.1)
        ended = tasks.create_task(serve([service], options, stop=stop, on_ready=port.set_result))
        address = f"127.0.0.1:{await port}"
        async with RawConnection(address, window=0) as stranger, client(address) as (_, health):
            stranger.call(WATCH, health_pb2.HealthCheckRequest(service=NAME))
            watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME))
            assert (await watch.read()).status == SERVING
            is_available = False
            assert (await watch.read()).status == NOT_SERVING
            stop.set()
            await ended


class Context:
    """A client's end of a watch."""

    def __init__(self):
        self.states = []
        self.code = None

    async def send_initial_metadata(self, metadata):
        pass

    async def write(self, message):
        self.states.append(message.status)

    async def abort(self, code, details, metadata):
        self.code = code
        raise grpc.aio.AbortError


async def test_health_watches_are_bounded_in_number_and_time():
    health = HealthServicer(max_unread_s=1.0, longest_watch_s=0.2, max_watches=2)
    health.set("", SERVING)
    contexts = [Context() for _ in range(3)]
    watches = [health.Watch(health_pb2.HealthCheckRequest(), context) for context in contexts]
    await asyncio.gather(*watches, return_exceptions=True)
    unavailable, exhausted = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [context.code for context in contexts] == [unavailable, unavailable, exhausted]
    assert [context.states for context in contexts] == [[SERVING], [SERVING], []]
