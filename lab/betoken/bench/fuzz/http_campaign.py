"""Sends mutated HTTP requests to a gateway and counts its responses; a fault of the gateway is reported with the bytes.

Every request is answered or refused in OpenAI's form. Whether other answers stay right the caller checks after a batch.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from betoken.bench.fuzz.campaign import FaultError
from betoken.bench.fuzz.http_mutants import request_bytes

_AT_ONCE = 20
_TIMEOUT_S = 60.0
_QUIET_S = 2.0
_LAST_EVENTS = ("data: [DONE]", "event: response.")


async def fuzz_http(
    host: str,
    port: int,
    count: int,
    chance: random.Random,
    check: Callable[[], Awaitable[None]],
    *,
    batch: int = 1000,
    accepted: frozenset[int] = frozenset(),
) -> Counter[int]:
    """Send `count` mutants; return how many got which status (0 = closed without one). `check` follows each batch.

    `accepted`: statuses from 500 on that are accepted, such as 503 of a gateway whose router is away.

    Raises:
        FaultError: one was answered 5xx, in another form, or not in time.
    """
    statuses: Counter[int] = Counter()
    for start in range(0, count, batch):
        left = iter([request_bytes(chance) for _ in range(min(batch, count - start))])

        async def some(left: object = left) -> None:
            for request in left:  # type: ignore[attr-defined]
                statuses[await _ask(host, port, request, accepted)] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(some())
        await check()
    return statuses


async def exchange(host: str, port: int, request: bytes, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Return all bytes until the gateway closes the connection or, if the request keeps it open, is silent for a while.

    Raises:
        TimeoutError: no response arrives.
    """
    reader, writer = await asyncio.open_connection(host, port)
    response, is_last = b"", b"\r\nconnection: close\r\n" in request
    try:
        writer.write(request)
        while part := await asyncio.wait_for(reader.read(1 << 16), timeout_s if is_last or not response else _QUIET_S):
            response += part
    except TimeoutError:
        if is_last or not response:
            raise
    except ConnectionError:
        pass
    finally:
        writer.close()
    return response


async def _ask(host: str, port: int, request: bytes, accepted: frozenset[int]) -> int:
    try:
        response = await exchange(host, port, request)
    except TimeoutError:
        raise FaultError(f"no response to {request[:2000]!r}") from None
    status = int(response[9:12]) if response.startswith(b"HTTP/1.1 ") and response[9:12].isdigit() else 0
    if fault := _fault(status, response, accepted):
        raise FaultError(f"{fault}: {response[:500]!r} for {request[:2000]!r}")
    return status


def _fault(status: int, response: bytes, accepted: frozenset[int]) -> str:
    """Return what is wrong with a response; empty if nothing is."""
    if not status:
        return "not HTTP" if response else ""
    if status in accepted:
        return ""
    if status >= 499:
        return f"status {status}"
    head, _, body = response.partition(b"\r\n\r\n")
    if status >= 400 and body:  # a response to HEAD has none
        try:
            error, _ = json.JSONDecoder().raw_decode(body.decode())  # responses to what follows may come after it
            return "" if error["error"]["message"] else "no message"
        except (ValueError, LookupError, TypeError):
            return "an error in another form"
    if b"text/event-stream" in head:
        text = body.decode("utf-8", "replace")
        return "" if any(end in text for end in _LAST_EVENTS) else "a stream without its end"
    return ""
