"""A router for tests that fails every call with one error, and a gateway in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from betoken.common.errors import BetokenError, UnauthenticatedError, to_status
from betoken.v1 import generation_pb2 as pb
from betoken.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from tests.gateway.conftest import Gate, running_gateway


class Strict(GenerationServiceServicer):
    """A router that answers every call with one error, and keeps what came with it."""

    def __init__(self) -> None:
        self.error: BetokenError = UnauthenticatedError("the key is not known")
        self.metadata: list[dict[str, Any]] = []
        self.steps: list[pb.GenerateResponse] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        for step in self.steps:
            yield step
        await self._fail(context)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        await self._fail(context)

    async def _fail(self, context: Any) -> None:
        code, details, metadata = to_status(self.error)
        context.set_trailing_metadata(metadata)
        await context.abort(code, details)


@asynccontextmanager
async def before(servicer: Strict) -> AsyncIterator[Gate]:
    """A gateway before a router that is `servicer`."""
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with running_gateway(None, f"127.0.0.1:{port}", max_outage_s=0) as gate:
            yield gate
    finally:
        await server.stop(None)
