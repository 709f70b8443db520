"""Sends the requests of a run: a closed loop of streams, or an open loop with Poisson arrivals.

A thread per stream; Python's lock is released while a thread waits for its server.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from betoken.loadtest.prompts import Prompt
from betoken.loadtest.record import Record

Ask = Callable[[Record, float], None]
"""Send a record's request, whose arrival is at this `time.perf_counter()`, and fill the record in."""


def run_closed(prompts: Sequence[Prompt], ask: Ask, concurrency: int) -> list[Record]:
    """Answer all prompts with `concurrency` streams, each of which sends its next request when one has ended."""
    records = [Record(prompt) for prompt in prompts]
    waiting, turn = iter(records), threading.Lock()
    begin = time.perf_counter()

    def work() -> None:
        while True:
            with turn:
                record = next(waiting, None)
            if record is None:
                return
            arrival = time.perf_counter()
            record.arrival_s = arrival - begin
            ask(record, arrival)

    _join([_started(work) for _ in range(min(concurrency, len(records)))])
    return records


def run_open(prompts: Sequence[Prompt], ask: Ask, request_rate: float, seed: int) -> list[Record]:
    """Send all prompts at the times of `arrivals`, whether or not earlier requests have ended.

    Latencies count from the scheduled times, so that a slow client does not hide a slow server.
    """
    records = [Record(prompt) for prompt in prompts]
    begin, threads = time.perf_counter(), []
    for record, arrival_s in zip(records, arrivals(len(records), request_rate, seed), strict=True):
        record.arrival_s = arrival_s
        time.sleep(max(0.0, begin + arrival_s - time.perf_counter()))
        threads.append(_started(ask, record, begin + arrival_s))
    _join(threads)
    return records


def arrivals(num: int, request_rate: float, seed: int) -> list[float]:
    """Return the times of a Poisson process of `request_rate` requests per second; the first is 0."""
    rng, times = random.Random(seed), [0.0]
    while len(times) < num:
        times.append(times[-1] + rng.expovariate(request_rate))
    return times[:num]


def _started(run: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=arguments, daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
