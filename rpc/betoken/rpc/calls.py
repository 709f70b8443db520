"""Limits concurrent calls so that one client cannot starve others or hold a call open indefinitely.

Calls whose message does not come, and calls whose end is not read, are few and end in time. Beyond their limit the
eldest goes, which is never a client that goes on. Health.Check is always answered. Knows `grpc.aio` and the names of
methods; knows no service.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import grpc

from betoken.common.errors import BetokenError, ResourceExhaustedError, UnavailableError
from betoken.rpc.servicing import abort, on_abort

_HEALTH, _REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection."
_FIRST_MESSAGE_S = 60.0
"""How long a client may take to send the first message: a large one comes slowly over a slow line."""
_LONGEST_REFLECTION_S = 60.0
_MAX_REFLECTIONS = 64
_IDLE_SHARE = 4
"""One in so many calls may wait for its message, and as many for their end to be read."""
_ALWAYS_S = 1.0
"""How long each may wait while there is any other room: messages may come well after their headers."""
_SWEEP_S = 1.0
_RETRY_AFTER_S = 1.0
_HANDLING = "_handle_exceptions"

_Task = asyncio.Task[Any]
_owners: WeakKeyDictionary[_Task, ref[_Task]] = WeakKeyDictionary()
"""Pairs gRPC's handler task with the task that waits for the call's end; the call ends once both have ended."""


def remember_owners(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop` note which task of gRPC made which. It offers no other way to end a call that its peer keeps open."""
    make: Any = loop.get_task_factory() or (lambda loop, coro, **options: asyncio.Task(coro, loop=loop, **options))

    def make_and_note(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> _Task:
        task: _Task = make(loop, coro, **options)
        if getattr(coro, "__name__", "") == _HANDLING and (owner := asyncio.current_task()) is not None:
            _owners[task] = ref(owner)
        return task

    factory: Any = make_and_note
    loop.set_task_factory(factory)


class _Call:
    """One call, from its headers to its end."""

    __slots__ = ("handling", "is_behaving", "kind", "owner", "why")

    def __init__(self, handling: _Task, kind: str) -> None:
        self.handling = handling
        self.kind = kind
        self.is_behaving = False
        """Whether the handler runs, and can send a status."""
        self.why: BetokenError | None = None
        """Final status, once the call must end."""
        noted = _owners.get(handling)
        self.owner = noted() if noted is not None else None

    def end(self, why: BetokenError) -> None:
        """End it with a status, or without one if none can be sent. In the latter case gRPC resets the stream, as
        its handler has gone; with the next call at the latest."""
        self.handling.cancel()
        if self.is_behaving and self.why is None:
            self.why = why
        elif self.owner is not None:
            self.owner.cancel()


class _Idle:
    """Calls that wait for their client, eldest first."""

    def __init__(self, what: str, longest_s: float, most: int) -> None:
        self._why = f"{what} within {longest_s:g} s, or other calls took its place"
        self._longest_s = longest_s
        self._most = most
        self._deadlines: dict[_Call, float] = {}

    def __bool__(self) -> bool:
        return bool(self._deadlines)

    def add(self, call: _Call, now_s: float) -> None:
        if call in self._deadlines:
            return
        self._deadlines[call] = now_s + self._longest_s
        if self.is_crowded and self.has_waited(_ALWAYS_S, now_s):
            self.end_eldest()

    def remove(self, call: _Call) -> None:
        self._deadlines.pop(call, None)

    def sweep(self, now_s: float) -> None:
        while self._deadlines and next(iter(self._deadlines.values())) <= now_s:
            self.end_eldest()

    @property
    def is_crowded(self) -> bool:
        """Whether more calls wait than the limit. In a burst, calls whose messages are still unread count."""
        return len(self._deadlines) > self._most

    def has_waited(self, seconds: float, now_s: float) -> bool:
        """Whether the eldest has waited that long."""
        deadline_s = next(iter(self._deadlines.values()), None)
        return deadline_s is not None and now_s - (deadline_s - self._longest_s) >= seconds

    def end_eldest(self) -> None:
        """Make room."""
        call = next(iter(self._deadlines))
        del self._deadlines[call]
        call.end(UnavailableError(self._why))


class CallLimits(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The first interceptor of a server; `remember_owners` is called before that starts."""

    def __init__(self, max_calls: int, max_unread_s: float, first_message_s: float = _FIRST_MESSAGE_S) -> None:
        """`max_calls`: limit on calls, health and reflection apart; more are refused with advice when to come again.

        `max_unread_s`: maximum time in which the end of a call may stay unread, seconds.
        """
        self._most = {"": max_calls, _REFLECTION: _MAX_REFLECTIONS}
        self._counts = {"": 0, _REFLECTION: 0, _HEALTH: 0}
        most_idle = max(1, max_calls // _IDLE_SHARE)
        self._silent = {kind: _Idle("the call sent no message", first_message_s, most_idle) for kind in self._counts}
        self._unread = _Idle("the call's end was not read", max_unread_s, most_idle)
        self._looking = _Idle("reflection was not over", _LONGEST_REFLECTION_S, _MAX_REFLECTIONS)
        self._is_sweeping = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC once per call."""
        handler = await continuation(handler_call_details)
        handling = asyncio.current_task()
        if handler is None or handling is None:
            return handler
        kind = next((kind for kind in (_HEALTH, _REFLECTION) if handler_call_details.method.startswith(kind)), "")
        is_full = self._counts[kind] >= self._most.get(kind, self._counts[kind] + 1)
        silent = self._silent[kind]
        if is_full and (silent.is_crowded or silent.has_waited(_ALWAYS_S, asyncio.get_running_loop().time())):
            silent.end_eldest()
        elif is_full:
            return _refusal(f"{self._counts[kind]} calls are served, the most there may be")
        call = _Call(handling, kind)
        self._begin(call)
        on_abort.set(lambda: self._wait(self._unread, call))
        return self._watched(handler, call)

    def _begin(self, call: _Call) -> None:
        self._counts[call.kind] += 1
        self._wait(self._silent[call.kind], call)
        if call.kind == _REFLECTION:
            self._wait(self._looking, call)
        call.handling.add_done_callback(lambda _: self._handled(call))

    def _handled(self, call: _Call) -> None:
        if call.owner is None or call.owner.done():
            self._end(call)
            return
        self._silent[call.kind].remove(call)
        self._wait(self._unread, call)
        call.owner.add_done_callback(lambda _: self._end(call))

    def _end(self, call: _Call) -> None:
        self._counts[call.kind] -= 1
        for idle in (self._silent[call.kind], self._unread, self._looking):
            idle.remove(call)
        call.owner = None  # which holds the other task: no cycle

    def _watched(self, handler: Any, call: _Call) -> Any:
        """The handler, with notifications of its first message and its end."""
        decode = handler.request_deserializer

        def heard(data: bytes) -> Any:
            self._silent[call.kind].remove(call)
            return decode(data) if decode is not None else data

        changes: dict[str, Any] = {"request_deserializer": heard}
        for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behave = getattr(handler, name)
            if inspect.isasyncgenfunction(behave):
                changes[name] = self._ending_generator(behave, call)
            elif inspect.iscoroutinefunction(behave):
                changes[name] = self._ending(behave, call)
        return handler._replace(**changes)

    def _ending(
        self, behave: Callable[[Any, Any], Awaitable[Any]], call: _Call
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def behave_to_the_end(request: Any, context: Any) -> Any:
            async with self._behaving(call, context):
                return await behave(request, context)

        return behave_to_the_end

    def _ending_generator(
        self, behave: Callable[[Any, Any], AsyncIterator[Any]], call: _Call
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def behave_to_the_end(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._behaving(call, context):
                async for response in behave(request, context):
                    yield response

        return behave_to_the_end

    @asynccontextmanager
    async def _behaving(self, call: _Call, context: Any) -> AsyncIterator[None]:
        call.is_behaving = True
        try:
            yield
        except asyncio.CancelledError:
            if call.why is None:
                raise
            call.handling.uncancel()
            await abort(context, call.why)
        finally:
            call.is_behaving = False
            self._wait(self._unread, call)

    def _wait(self, idle: _Idle, call: _Call) -> None:
        loop = asyncio.get_running_loop()
        idle.add(call, loop.time())
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        idles = (*self._silent.values(), self._unread, self._looking)
        for idle in idles:
            idle.sweep(loop.time())
        self._is_sweeping = any(idles)
        if self._is_sweeping:
            loop.call_later(_SWEEP_S, self._sweep)


def _refusal(text: str) -> Any:
    """A handler that refuses any call, before its message is read."""

    async def refuse(_requests: Any, context: Any) -> None:
        await abort(context, ResourceExhaustedError(text, retry_after_s=_RETRY_AFTER_S))

    return grpc.stream_stream_rpc_method_handler(refuse)
