"""The health service: what each service's state is, now and as it changes.

In contrast to the stock one it writes outside of any lock. A watcher that does not read holds up neither other watchers
nor the teller of the state. Knows names and states only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.common.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from betoken.rpc.servicing import typed_errors
from betoken.rpc.unread import ReplyWriter

Response = health_pb2.HealthCheckResponse

_LONGEST_WATCH_S = 900.0
_MAX_WATCHES = 256
_RETRY_AFTER_S = 10.0


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """`grpc.health.v1.Health`."""

    def __init__(
        self, max_unread_s: float, longest_watch_s: float = _LONGEST_WATCH_S, max_watches: int = _MAX_WATCHES
    ) -> None:
        self._max_unread_s = max_unread_s
        self._longest_watch_s = longest_watch_s
        self._max_watches = max_watches
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._num_watches = 0
        self._is_stopping = False

    def set(self, name: str, state: int) -> None:
        """Set the state of a service; the empty name is the process. No effect once it stops."""
        if not self._is_stopping and self._states.get(name) != state:
            self._states[name] = state
            self._wake()

    def stop(self) -> None:
        """Serving ends here."""
        self._is_stopping = True
        self._states = dict.fromkeys(self._states, Response.NOT_SERVING)
        self._wake()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 (gRPC names it)
        """The state of one service."""
        async with typed_errors(context):
            if request.service not in self._states:
                raise NotFoundError("no such service")
            return Response(status=self._states[request.service])
        raise AssertionError("unreachable: typed_errors ends the call")

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """The state of one service, and each that follows, for a while."""
        async with typed_errors(context):
            if self._num_watches >= self._max_watches:
                limit = f"{self._num_watches} calls watch, the most there may be"
                raise ResourceExhaustedError(limit, retry_after_s=_RETRY_AFTER_S)
            self._num_watches += 1
            try:
                await self._watch(request.service, context)
            finally:
                self._num_watches -= 1

    async def _watch(self, name: str, context: Any) -> None:
        told: int | None = None
        try:
            async with asyncio.timeout(self._longest_watch_s):
                with ReplyWriter(context, self._max_unread_s) as writer:
                    while True:
                        changed, state = self._changed, self._states.get(name, Response.SERVICE_UNKNOWN)
                        if state != told:
                            told = state
                            await writer.write(Response(status=state))
                        else:
                            await changed.wait()
        except TimeoutError:
            raise UnavailableError(f"a watch lasts {self._longest_watch_s:g} s; watch again") from None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
