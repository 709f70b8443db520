"""Turns calls without a good key away before their message is read, however large it is.

Knows keys and `grpc.aio`; what a caller may do is asked again, and decided, by the servicer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from betoken.common.errors import BetokenError
from betoken.router.access.keys import Keys

Refuse = Callable[[Any, str, BetokenError], Awaitable[None]]
_SERVICE = "/betoken.v1.GenerationService/"
_OPEN_TO_ALL = frozenset({f"{_SERVICE}GetModelInfo"})


class KeysFirst(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Install it before all others."""

    def __init__(self, keys: Keys, refuse: Refuse) -> None:
        """`refuse` ends the call of a stranger: (context, method, why)."""
        self._keys = keys
        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC once per call."""
        details: Any = handler_call_details
        if self._keys.are_needed and details.method.startswith(_SERVICE) and details.method not in _OPEN_TO_ALL:
            try:
                self._keys.caller(details.invocation_metadata)
            except BetokenError as error:
                return self._refusal(details.method.removeprefix(_SERVICE), error)
        return await continuation(handler_call_details)

    def _refusal(self, method: str, error: BetokenError) -> Any:
        """A handler that reads nothing, which only one of a stream of requests can."""

        async def refuse(_requests: Any, context: Any) -> None:
            await self._refuse(context, method, error)

        return grpc.stream_stream_rpc_method_handler(refuse)
