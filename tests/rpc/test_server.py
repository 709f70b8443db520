"""The server: ready file, health, reflection, connections, drain, garbage collection after the load."""

import asyncio
import gc
import json
import os
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from betoken.common.errors import (
    InternalError,
    UnavailableError,
    from_rpc_error,
)
from betoken.rpc import server
from betoken.rpc.link import LinkCallbacks, LinkServicer, VerifyLink
from betoken.rpc.server import Service, importing
from betoken.rpc.settings import ServiceSettings
from betoken.v1 import generation_pb2_grpc, verify_pb2_grpc
from betoken.v1.generation_pb2 import (
    TokenizeRequest,
    TokenizeResponse,
)
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.rpc.harness import NAME, NOT_SERVING, SERVING, Running, SlowServicer, health_of

from .conftest import HELLO, EchoHandler


async def tokenize(address: str, timeout_s: float = 30.0):
    async with grpc.aio.insecure_channel(address) as channel:
        return await generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(TokenizeRequest(), timeout=timeout_s)


async def test_a_server_has_a_ready_file_health_and_reflection(tmp_path):
    ready_file = tmp_path / "ready.json"
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(ready_file=ready_file))
        address = await running.address()
        assert json.loads(ready_file.read_text()) == {"port": int(address.rpartition(":")[2]), "pid": os.getpid()}
        assert os.listdir(tmp_path) == ["ready.json"], "written atomically, nothing left behind"
        assert [await health_of(address), await health_of(address, "")] == [SERVING, SERVING]
        async with grpc.aio.insecure_channel(address) as channel:
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=30):
                assert NAME in [service.name for service in answer.list_services_response.service]
        running.stop.set()
    assert not ready_file.exists()


async def test_without_reflection_a_service_is_not_described_and_serves():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(reflection=False))
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await health_of(address) == SERVING
        running.stop.set()


async def test_the_largest_max_concurrent_rpcs_is_accepted():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(max_concurrent_rpcs=1 << 20))
        assert await health_of(await running.address()) == SERVING
        running.stop.set()


async def test_an_old_connection_gets_no_new_calls_and_keeps_the_others():
    class PeerServicer(SlowServicer):
        def __init__(self):
            super().__init__()
            self.peers = []

        async def Tokenize(self, request, context):
            self.peers.append(context.peer())
            return await super().Tokenize(request, context) if request.prompt else TokenizeResponse()

    servicer = PeerServicer()
    service = Service(NAME, servicer, generation_pb2_grpc.add_GenerationServiceServicer_to_server)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(), [service], max_connection_age_s=0.2)
        async with grpc.aio.insecure_channel(await running.address()) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            slow = stub.Tokenize(TokenizeRequest(prompt="slow"))
            await servicer.started.wait()
            while len(set(servicer.peers)) == 1:
                await stub.Tokenize(TokenizeRequest())
                await asyncio.sleep(0.02)
            servicer.released.set()
            assert (await slow).ids == [1]
        running.stop.set()


async def test_a_service_that_ends_leaves_its_successors_ready_file(tmp_path):
    settings = ServiceSettings(ready_file=tmp_path / "ready.json")
    async with asyncio.TaskGroup() as tasks:
        first = Running(tasks, settings)
        await first.address()
        second = Running(tasks, settings)
        port = int((await second.address()).rpartition(":")[2])
        first.stop.set()
        await first.task
        assert json.loads(settings.ready_file.read_text())["port"] == port
        second.stop.set()
    assert not settings.ready_file.exists()


async def test_open_calls_finish_and_new_ones_are_refused_while_draining():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=60))
        address = await running.address()
        call = tasks.create_task(tokenize(address))
        await running.servicer.started.wait()
        running.stop.set()
        with pytest.raises(grpc.aio.AioRpcError):  # also of a call that came as it ceased to listen
            async with asyncio.timeout(30):
                while True:
                    await health_of(address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(address)
        assert isinstance(from_rpc_error(caught.value), UnavailableError)
        running.servicer.released.set()
        assert list((await call).ids) == [1]
        async with asyncio.timeout(30):
            await running.task


async def test_the_health_of_a_service_follows_its_availability(monkeypatch):
    monkeypatch.setattr(server, "_HEALTH_PERIOD_S", 0.01)
    is_available = False
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    async with asyncio.TaskGroup() as tasks:
        services = [Service(NAME, SlowServicer(), add, is_available=lambda: is_available)]
        running = Running(tasks, ServiceSettings(), services)
        address = await running.address()
        assert [await health_of(address), await health_of(address, "")] == [NOT_SERVING, SERVING]
        for is_available in (True, False):
            async with asyncio.timeout(30):
                while (await health_of(address) == SERVING) is not is_available:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await health_of(address, "") == SERVING
        running.stop.set()


async def test_health_turns_before_the_drain_and_the_drain_is_bounded():
    draining = asyncio.Event()
    seen: list[float] = []

    async def on_drain(grace_s: float) -> None:
        seen.append(grace_s)
        draining.set()
        await asyncio.sleep(3600)

    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=0.2), on_drain=on_drain)
        address = await running.address()
        running.stop.set()
        await draining.wait()
        assert await health_of(address) == NOT_SERVING
        async with asyncio.timeout(30):
            await running.task
    assert seen == [0.2]


async def test_a_drain_of_a_router_stops_listening_at_once_and_finishes_open_calls():
    draining, is_over = asyncio.Event(), asyncio.Event()

    async def on_drain(_grace_s: float) -> None:
        draining.set()
        await is_over.wait()

    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=60), on_drain=on_drain, sends_away=True)
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            open_call = generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(TokenizeRequest(), timeout=30)
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
            assert (await watching.read()).status == SERVING
            await running.servicer.started.wait()
            running.stop.set()
            await draining.wait()
            assert (await watching.read()).status == NOT_SERVING
            refusals = []
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await health_of(address)
                refusals.append(failed.value.code())
            # gRPC cancels what comes in as it ceases to listen, which the SDK takes for a stream that was cut off.
            assert refusals[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert refusals[1] is grpc.StatusCode.UNAVAILABLE
            running.servicer.released.set()
            assert list((await open_call).ids) == [1]
            is_over.set()
            async with asyncio.timeout(30):  # whoever watches its health holds up nothing
                await running.task
            watching.cancel()


async def test_an_idle_link_does_not_hold_up_a_drain():
    handler = EchoHandler()
    servicer = LinkServicer(lambda: HELLO, handler, VerifyLinkResponse)
    service = Service("betoken.v1.VerifyService", servicer, verify_pb2_grpc.add_VerifyServiceServicer_to_server)
    ignore = LinkCallbacks(lambda *_: None, lambda *_: None, lambda *_: None, lambda _: None)
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=60), [service], on_drain=servicer.drain)
        link = VerifyLink(await running.address(), ignore)
        await link.connect_once()
        tasks.create_task(link.run())
        running.stop.set()
        async with asyncio.timeout(30):
            await running.task
        await link.close()
    assert handler.closed == [1]


async def test_a_failure_ends_a_drain_too():
    failure = asyncio.get_running_loop().create_future()

    async def on_drain(grace_s: float) -> None:
        failure.set_result(LookupError("lost"))
        await asyncio.sleep(3600)

    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                settings = ServiceSettings(drain_grace_s=60)
                running = Running(tasks, settings, on_drain=on_drain, failure=failure)
                await running.address()
                running.stop.set()
    (error,) = caught.value.exceptions
    assert isinstance(error, InternalError) and str(error) == "LookupError: lost"


def test_a_full_garbage_collection_skips_objects_made_at_load():
    code = "import gc; from betoken.rpc.server import freeze_loaded; before = len(gc.get_objects()); freeze_loaded(); "
    code += "assert len(gc.get_objects()) < before / 10 and gc.get_freeze_count() > before / 2"
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True, timeout=60
    )


def test_garbage_collection_skips_imports_even_if_they_fail():
    before = gc.get_freeze_count()
    kept = []
    with pytest.raises(ImportError, match="no_such_module"), importing():
        assert not gc.isenabled()
        kept.append([])
        import no_such_module  # noqa: F401
    assert gc.isenabled() and gc.get_freeze_count() > before
    assert not any(found is kept for found in gc.get_objects())
