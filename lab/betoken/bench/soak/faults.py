"""Faults that a soak makes: kills, stops, drains, rude clients, hostile frames.

Each fault is over, and its service back, before it returns. Knows no answers.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

from betoken.bench.fuzz import seeds
from betoken.bench.fuzz.campaign import FaultError, fuzz_calls, fuzz_link
from betoken.cli.local_services import LocalServices
from betoken.client import AsyncClient, BetokenError, GenerateOptions, RetryPolicy
from betoken.testing.mutation import Mutator

_PROMPT = "Tell me a long story about"
_LONG: GenerateOptions = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
_STOP_S = (0.5, 4.0)
_PAUSE_S = (0.2, 3.0)
_RUDE_PAUSE_S = (0.0, 0.5)
_NUM_MUTANTS = 24
_GONE = ("RST_STREAM", "Socket closed", "Connection reset", "End of TCP stream", "recvmsg")
"""gRPC's words for a service that was killed meanwhile, which is no fault of its own."""


class Faults:
    """Injects faults until the soak ends; `counts` by kind."""

    def __init__(self, services: LocalServices, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        """What services did wrong under hostile frames, in words."""
        self._services = services
        self._random = random.Random(seed)
        self._mutator = Mutator(seed)
        self._workers = [name for name in services.services if name not in ("router", "gateway")]

    async def harm_services(self, ends: asyncio.Event) -> None:
        """Kill, stop or drain one after the other: as many verify workers are left as answers need."""
        kinds = [self._kill, self._kill, self._stop, self._stop, self._drain]
        while not ends.is_set():
            kind = self._kill_router if self._random.random() < 0.08 else self._random.choice(kinds)
            self.counts[await kind()] += 1
            await asyncio.sleep(self._random.uniform(*_PAUSE_S))

    async def be_rude(self, ends: asyncio.Event) -> None:
        """Cancel, vanish, read slowly and send mutants, one after the other."""
        kinds = [
            self._cancel,
            self._vanish,
            self._read_slowly,
            self._call,
            self._link,
        ]
        while not ends.is_set():
            try:
                self.counts[await self._random.choice(kinds)()] += 1
            except FaultError as error:
                if not any(words in str(error) for words in _GONE):
                    self.found.append(str(error))
            await asyncio.sleep(self._random.uniform(*_RUDE_PAUSE_S))

    async def _kill(self) -> str:
        name = self._random.choice(self._workers)
        await asyncio.to_thread(self._services.kill, name)
        await asyncio.to_thread(self._services.restart, name)
        return f"kill {name.partition('-')[0]}"

    async def _kill_router(self) -> str:
        await asyncio.to_thread(self._services.kill, "router")
        await asyncio.to_thread(self._services.restart, "router")
        return "kill router"

    async def _stop(self) -> str:
        name = self._random.choice(self._workers)
        service = self._services.services[name]
        service.pause()
        try:
            await asyncio.sleep(self._random.uniform(*_STOP_S))
        finally:
            service.resume()
        return f"stop {name.partition('-')[0]}"

    async def _drain(self) -> str:
        name = self._random.choice(self._workers)
        service = self._services.services[name]
        service.terminate()
        if not await asyncio.to_thread(service.wait, 30.0):
            self.found.append(f"{name} did not end within 30 s of SIGTERM")
            await asyncio.to_thread(service.kill)
        await asyncio.to_thread(self._services.restart, name)
        return f"drain {name.partition('-')[0]}"

    async def _cancel(self) -> str:
        num_pieces = self._random.randint(0, 20)
        async with self._client() as client:
            generation = client.generate(_PROMPT, **_LONG)
            with suppress(BetokenError):
                async for _ in generation:
                    if (num_pieces := num_pieces - 1) < 0:
                        break
            generation.cancel()
        return "cancel"

    async def _vanish(self) -> str:
        client = self._client()
        reading = asyncio.ensure_future(client.complete(_PROMPT, **_LONG))
        await asyncio.sleep(self._random.uniform(0.0, 1.0))
        await client.close()
        await asyncio.gather(reading, return_exceptions=True)
        return "vanish"

    async def _read_slowly(self) -> str:
        num_pieces = 6
        async with self._client() as client:
            with suppress(BetokenError):
                async for _ in client.generate(_PROMPT, **_LONG):
                    await asyncio.sleep(0.5)
                    if (num_pieces := num_pieces - 1) < 0:
                        break
        return "read slowly"

    async def _call(self) -> str:
        method, originals = self._random.choice(list(seeds.calls().items()))
        await fuzz_calls(self._services.address, method, originals, self._mutator, _NUM_MUTANTS, _nothing)
        return f"{_NUM_MUTANTS} mutated calls"

    async def _link(self) -> str:
        name = self._random.choice(self._workers)
        role = name.partition("-")[0]
        frames = seeds.verify_frames if role == "verify" else seeds.draft_frames
        address = self._services.services[name].address
        await fuzz_link(address, role, frames, self._mutator, _NUM_MUTANTS, _nothing)
        return f"{_NUM_MUTANTS} mutated frames to {role}"

    def _client(self) -> AsyncClient:
        return AsyncClient(self._services.address, retry=RetryPolicy(max_retries=0), timeout_s=60.0)


async def _nothing() -> None:
    """Checks after a batch: the healthy streams beside it are right."""
