"""Results reach each router's link, and with them, now and then, the load."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from betoken.rpc.link import worker_entries
from betoken.rpc.link.commands import CloseLink
from betoken.rpc.link.worker_entries import EntryHandler, LinkResults
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad
from betoken.v1.types_pb2 import CloseSequence
from betoken.v1.verify_pb2 import VerificationResult, VerifyLinkResponse


class Recorder:
    """A fake connected router."""

    def __init__(self, link_id):
        self.id = link_id
        self.frames = []

    def send(self, frame):
        self.frames.append(frame)


@pytest.mark.parametrize(("interval_s", "are_reported"), [(0.0, [True] * 4), (3600.0, [True, False, False, False])])
def test_each_router_receives_the_load_once_an_interval(monkeypatch, interval_s, are_reported):
    monkeypatch.setattr(worker_entries, "LOAD_INTERVAL_S", interval_s)
    links = [Recorder(1), Recorder(2)]
    results = LinkResults(VerifyLinkResponse)
    for link in links:
        results.add(link)
    numbers = itertools.count(1)
    for _ in range(4):  # in turn: a report to one router does not delay the other
        for link in links:
            results.send(
                "results",
                [((link.id, 7), VerificationResult(sequence_id=7))],
                lambda: WorkerLoad(next(numbers), 0, 9, 9),
            )
    for link in links:
        assert [frame.HasField("load") for frame in link.frames] == are_reported
        assert all(len(frame.results) == 1 for frame in link.frames)
    assert next(numbers) == 1 + 2 * sum(are_reported)  # not computed for routers that do not receive it
    results.load_changed(WorkerLoad(99, 0, 9, 9))
    assert all(link.frames[-1].load.running == 99 for link in links)


class Recording:
    """A core, a link and results that note what becomes of them; commands are words, but for the base's own."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.handler: EntryHandler[str, VerifyLinkResponse] = EntryHandler(self.commands.extend, self)  # type: ignore[arg-type]
        self.id = 1

    def take(self, *entries: CloseSequence, convert: Any) -> None:
        self.handler.submit(self.handler.checked(self, entries, convert))  # type: ignore[arg-type]

    def remove(self, link_id: int) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_entries_that_come_while_an_open_is_prepared_wait_for_it() -> None:
    bench, ready = Recording(), threading.Event()
    entry, other = CloseSequence(sequence_id=7), CloseSequence(sequence_id=8)

    def opening(key: SequenceKey, _: Any) -> None:
        bench.handler.prepared(key, lambda: ready.wait(10), lambda _: "open")

    bench.take(entry, convert=opening)
    bench.take(entry, other, convert=lambda key, _: f"block {key[1]}")
    assert bench.commands == ["block 8"], "others go on"
    ready.set()
    await until(lambda: len(bench.commands) == 3)
    assert bench.commands == ["block 8", "open", "block 7"]


async def test_an_open_whose_link_has_ended_is_dropped() -> None:
    bench, ready = Recording(), threading.Event()
    entry = CloseSequence(sequence_id=7)
    done: list[bool] = []

    def prepare() -> None:
        ready.wait(10)
        done.append(True)

    bench.take(entry, convert=lambda key, _: bench.handler.prepared(key, prepare, lambda _: "open"))
    bench.handler.link_closed(bench)  # type: ignore[arg-type]
    ready.set()
    await until(lambda: bool(done))
    await asyncio.sleep(0.02)
    assert bench.commands == [CloseLink(1)]
