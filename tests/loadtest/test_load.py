"""Closed and open loops."""

import threading
import time

import pytest

from betoken.loadtest.load import arrivals, run_closed, run_open
from betoken.loadtest.prompts import Prompt

PROMPTS = [Prompt(index, "x") for index in range(12)]


class Server:
    """Ends requests after a time, and counts those at work."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.num_running, self.most_running = takes_s, 0, 0
        self.sent_s: list[float] = []
        self._lock = threading.Lock()

    def ask(self, record, begin):
        with self._lock:
            self.sent_s.append(time.perf_counter() - begin)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(self.takes_s)
        with self._lock:
            self.num_running -= 1
        record.end_s = time.perf_counter() - begin


def test_a_closed_loop_keeps_its_number_of_streams_at_work():
    server = Server(0.03)
    records = run_closed(PROMPTS, server.ask, 3)
    assert server.most_running == 3
    assert [record.prompt.index for record in records] == list(range(12))
    arrived = sorted(record.arrival_s for record in records)
    assert all(later >= earlier + 0.02 for earlier, later in zip(arrived, arrived[3:], strict=False))


def test_an_open_loop_sends_requests_although_earlier_ones_run():
    server = Server(0.3)
    records = run_open(PROMPTS, server.ask, 200.0, seed=1)
    assert server.most_running == 12
    assert [record.arrival_s for record in records] == arrivals(12, 200.0, 1)
    assert all(sent_s >= 0 for sent_s in server.sent_s)


def test_arrivals_are_a_poisson_process_of_their_seed():
    times = arrivals(20_000, 50.0, 3)
    assert times == arrivals(20_000, 50.0, 3) != arrivals(20_000, 50.0, 4)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0 and mean == pytest.approx(1 / 50, rel=0.03)
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 * mean**2, rel=0.06)  # exponential gaps
