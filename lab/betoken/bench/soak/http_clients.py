"""HTTP clients of a soak: healthy ones whose answers are compared, and hostile ones.

Speaks HTTP over sockets, as browsers and attackers do; knows no faults of services.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from betoken.bench.fuzz.campaign import FaultError
from betoken.bench.fuzz.http_campaign import exchange, fuzz_http
from betoken.bench.soak.traffic import Case

_AWAY = frozenset({503, 504})
"""Statuses while workers or the router are killed."""
_RETRIED = frozenset({429, 503, 504})
_NUM_MUTANTS = 24
_TIMEOUT_S = 300.0
_PROBE = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_PROBE_S = 10.0
_HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n"


def post(body: dict[str, Any]) -> bytes:
    """Return a completion request."""
    data = json.dumps(body).encode()
    return (_HEAD.format(len(data)) + "connection: close\r\n\r\n").encode() + data


@dataclass(slots=True)
class HttpTraffic:
    """Healthy clients, one request after the other; the ids of each answer are compared."""

    host: str
    port: int
    cases: list[Case]
    num_compared: int = 0
    num_equal: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self, seed: int, ends: asyncio.Event) -> None:
        """Ask until the end; a response with retry-after is asked for again."""
        chance = random.Random(seed)
        while not ends.is_set():
            case = chance.choice(self.cases)
            options = case.options
            body = {
                "prompt": case.prompt,
                "max_tokens": options["max_new_tokens"],
                "temperature": options["temperature"],
                "seed": options["seed"],
                "ignore_eos": True,
                "betoken": {"provenance": True},
            }
            try:
                response = await exchange(self.host, self.port, post(body), _TIMEOUT_S)
            except (TimeoutError, OSError) as error:
                self.failures.append(f"HTTP: {error!r}")
                continue
            head, _, data = response.partition(b"\r\n\r\n")
            status = int(head[9:12] or 0)
            if status in _RETRIED and b"retry-after" in head.lower():
                await asyncio.sleep(0.5)
            elif status != 200:
                self.failures.append(f"HTTP {status}: {data[:200]!r}")
            else:
                ids = tuple(token["id"] for token in json.loads(data)["choices"][0]["betoken"]["tokens"])
                self.num_compared += 1
                self.num_equal += ids == case.output_ids


class HostileHttp:
    """Hostile clients; `counts` by kind, `found` in words."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        self._place = host, port
        self._random = random.Random(seed)

    async def run(self, ends: asyncio.Event) -> None:
        """Be hostile in one way after the other, and probe the gateway after each."""
        kinds = [
            self._mutate,
            self._leave_bodies,
            self._send_strays,
            self._stay_idle,
            self._send_wrong_entries,
            self._leave_streams,
            self._read_nothing,
        ]
        while not ends.is_set():
            try:
                self.counts[await self._random.choice(kinds)()] += 1
                await self._probe()
            except (FaultError, TimeoutError, OSError) as error:
                self.found.append(f"HTTP: {error!r}"[:2000])
            await asyncio.sleep(self._random.uniform(0.0, 0.5))

    async def warm_up(self) -> None:
        """Send one request of each kind, so that what the gateway loads for the first ones does not count as growth."""
        for kind in (self._mutate, self._stay_idle, self._send_wrong_entries, self._leave_bodies, self._read_nothing):
            await kind()

    async def _probe(self) -> None:
        response = await exchange(*self._place, _PROBE, _PROBE_S)
        if not response.startswith(b"HTTP/1.1 200"):
            raise FaultError(f"the liveness probe got {response[:200]!r}")

    async def _mutate(self) -> str:
        await fuzz_http(*self._place, _NUM_MUTANTS, self._random, _nothing, accepted=_AWAY)
        return "mutated HTTP requests"

    async def _leave_bodies(self) -> str:
        await self._hold(300, post({"prompt": "a" * 20_000})[:-9], 1.0)
        return "unfinished bodies"

    async def _send_strays(self) -> str:
        await self._hold(50, b"GET /version HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\na\r\n", 1.0)
        return "stray bytes"

    async def _stay_idle(self) -> str:
        await self._hold(1200, b"", 1.0)
        return "idle connections"

    async def _send_wrong_entries(self) -> str:
        entries = ",".join(["{}"] * self._random.randint(1000, 400_000))
        body = f'{{"input": [{entries}]}}'.encode()
        head = _HEAD.replace("completions", "responses").format(len(body)) + "connection: close\r\n\r\n"
        await exchange(*self._place, head.encode() + body)
        return "wrong entries"

    async def _leave_streams(self) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
        await self._hold(8, post(body), self._random.uniform(0.1, 2.0))
        return "left streams"

    async def _read_nothing(self) -> str:
        await self._hold(4, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200, 3.0)
        return "unread answers"

    async def _hold(self, num: int, sent: bytes, seconds: float) -> None:
        """Open `num` connections, send, and leave them open for a while; the gateway may close them."""
        writers: list[asyncio.StreamWriter] = []
        try:
            for _ in range(num):
                reader, writer = await asyncio.open_connection(*self._place, limit=1024)
                writers.append(writer)
                writer.write(sent)
            await asyncio.sleep(seconds)
        finally:
            for writer in writers:
                writer.transport.abort()


async def _nothing() -> None:
    """Checks after a batch: the healthy clients run at the same time."""
