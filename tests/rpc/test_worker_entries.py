"""Results reach each router's link, and with them, now and then, the load."""

import itertools

import pytest

from betoken.rpc.link import worker_entries
from betoken.rpc.link.worker_entries import LinkResults, WorkerLoad
from betoken.v1.verify_pb2 import Verdict, VerifyLinkResponse


class Recorder:
    """Stands in for a connected router."""

    def __init__(self, link_id):
        self.id = link_id
        self.frames = []

    def send(self, frame):
        self.frames.append(frame)


@pytest.mark.parametrize(("interval_s", "are_told"), [(0.0, [True] * 4), (3600.0, [True, False, False, False])])
def test_each_router_hears_the_load_once_an_interval(monkeypatch, interval_s, are_told):
    monkeypatch.setattr(worker_entries, "LOAD_INTERVAL_S", interval_s)
    links = [Recorder(1), Recorder(2)]
    results = LinkResults(VerifyLinkResponse)
    for link in links:
        results.add(link)
    numbers = itertools.count(1)
    for _ in range(4):  # by turns: what one hears is no reason for the other to wait
        for link in links:
            results.send(
                "verdicts", [((link.id, 7), Verdict(sequence_id=7))], lambda: WorkerLoad(next(numbers), 0, 9, 9)
            )
    for link in links:
        assert [frame.HasField("load") for frame in link.frames] == are_told
        assert all(len(frame.verdicts) == 1 for frame in link.frames)
    assert next(numbers) == 1 + 2 * sum(are_told)  # not made for those that do not hear it
    results.load_changed(WorkerLoad(99, 0, 9, 9))
    assert all(link.frames[-1].load.running == 99 for link in links)
