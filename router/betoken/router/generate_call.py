"""One call of Generate whose requests are valid: runs its answers and sends their events, one message at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from betoken.router.core import Router
from betoken.router.parallel_sampling import run_together
from betoken.router.policy.byte_budget import HeldBytes
from betoken.router.policy.reservation import Reservation
from betoken.router.request.generation import GenerationRequest
from betoken.router.request_scope import RequestScope
from betoken.router.responses import response_of
from betoken.router.round.events import Event, Finished, Started, Tokens
from betoken.router.scopes import RequestScopes
from betoken.rpc.unread import ReplyWriter


class GenerateCall:
    """The answers of one call."""

    def __init__(
        self,
        router: Router,
        scopes: RequestScopes,
        scope: RequestScope,
        writer: ReplyWriter,
        held_bytes: HeldBytes,
        reserved: Reservation,
    ) -> None:
        """`scope`: of the call; `held_bytes` are released with the first event, as the request is at work then."""
        self._router = router
        self._scopes = scopes
        self._scope = scope
        self._writer = writer
        self._held_bytes = held_bytes
        self._reserved = reserved
        self._turn = asyncio.Lock()
        self._is_prompt_computed = asyncio.Event()

    async def run(self, requests: Sequence[GenerationRequest]) -> None:
        """Run one answer for each request. The first computes the prompt; the others then reuse its KV."""
        first, *further = requests
        if not further:
            await self._first(first)
            return
        others = [partial(self._further, index, request) for index, request in enumerate(further, 1)]
        await run_together([partial(self._first, first), *others])

    async def _first(self, request: GenerationRequest) -> None:
        await self._router.generate(request, partial(self._send, 0, self._scope), self._scope.counts)

    async def _further(self, index: int, request: GenerationRequest) -> None:
        await self._is_prompt_computed.wait()
        with self._scopes.further(self._scope, request.request_id) as scope:
            scope.accepted(request)
            await self._router.generate(request, partial(self._send, index, scope), scope.counts)

    async def _send(self, index: int, scope: RequestScope, event: Event) -> None:
        self._reserved.use(_num_charged(event, is_first=index == 0))
        self._held_bytes.release()
        async with self._turn:
            await self._writer.write(response_of(event, index))
        scope.sent(event)
        if index == 0 and isinstance(event, Tokens | Finished):
            self._is_prompt_computed.set()


def _num_charged(event: Event, *, is_first: bool) -> int:
    """Tokens that an event charges to the caller's accounts: the prompt once, and all output tokens."""
    match event:
        case Started(request):
            return len(request.prompt_ids) if is_first else 0
        case Tokens():
            return event.num_tokens
        case _:
            return 0
