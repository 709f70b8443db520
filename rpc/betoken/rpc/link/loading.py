"""The servicer of a worker that listens while it loads: rejects links with the progress, then passes them on."""

from collections.abc import Callable
from typing import Any

from betoken.common.errors import LoadingError
from betoken.rpc.link.worker_side import LinkServicer
from betoken.rpc.servicing import typed_errors


class LoadingServicer:
    """Stands for a worker's `LinkServicer` until that exists: pass it to the generated `add_…Servicer_to_server`."""

    def __init__(self, progress: Callable[[], LoadingError]) -> None:
        """`progress`: the status of links that come too early."""
        self._progress = progress
        self._servicer: LinkServicer[Any, Any] | None = None

    def loaded(self, servicer: LinkServicer[Any, Any]) -> None:
        """Pass links to `servicer` from now on."""
        self._servicer = servicer

    async def Link(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 (gRPC names it)
        """One link, or its rejection."""
        if self._servicer is not None:
            await self._servicer.Link(request_iterator, context)
            return
        async with typed_errors(context):
            raise self._progress()

    async def drain(self, grace_s: float) -> None:
        """See `LinkServicer.drain`."""
        if self._servicer is not None:
            await self._servicer.drain(grace_s)
