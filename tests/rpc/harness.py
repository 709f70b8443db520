"""A server in the test's event loop, with a servicer that answers on release, its health, and frames of links."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.rpc.server import Service, serve
from betoken.rpc.settings import ServiceSettings
from betoken.v1 import generation_pb2_grpc
from betoken.v1.generation_pb2 import (
    TokenizeResponse,
)
from betoken.v1.verify_pb2 import DraftBlock

NAME = "betoken.v1.GenerationService"


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class SlowServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Tokenize answers when released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.started = asyncio.Event()

    async def Tokenize(self, request, context):
        self.started.set()
        await self.released.wait()
        return TokenizeResponse(ids=[1])


class Running:
    """A server in this event loop, with its port and its stop event."""

    def __init__(self, tasks: asyncio.TaskGroup, settings: ServiceSettings, services=None, **options) -> None:
        self.servicer = SlowServicer()
        self.stop = asyncio.Event()
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        services = services or [Service(NAME, self.servicer, add)]
        self.task = tasks.create_task(
            serve(services, settings, stop=self.stop, on_ready=self._port.set_result, **options)
        )

    async def address(self) -> str:
        return f"127.0.0.1:{await self._port}"


async def health_of(address: str, name: str = NAME) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)).status


def block(sequence_id: int, num_drafts: int = 4) -> DraftBlock:
    return DraftBlock(sequence_id=sequence_id, base_length=10, draft_ids=range(num_drafts))
