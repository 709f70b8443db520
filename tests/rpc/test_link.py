"""Frames of a link against real servers: coalesced, in order, whole."""

import threading

from betoken.v1.types_pb2 import CloseSequence, OpenSequence, WorkerHello
from betoken.v1.verify_pb2 import VerificationResult, VerifyLinkResponse
from tests.rpc.harness import block

from .conftest import HELLO, eventually


async def test_entries_of_one_event_loop_turn_are_sent_as_one_frame(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    for sequence_id in range(1, 65):
        recorded.link.send(blocks=[block(sequence_id)])
    await eventually(lambda: len(recorded.results) == 64)
    assert len(worker.handler.requests) == 1
    assert len(recorded.frames) == 1
    assert [result.sequence_id for result in recorded.results] == list(range(1, 65))
    assert recorded.link.load.running == 64


async def test_frames_sent_from_another_thread_arrive_in_order_and_coalesce(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    peer = worker.handler.links[0]

    def engine() -> None:
        for step in range(2000):
            frame = VerifyLinkResponse(results=[VerificationResult(sequence_id=1, base_length=step)])
            frame.load.free_pages = 2000 - step - 1
            peer.send(frame)

    thread = threading.Thread(target=engine)
    thread.start()
    await eventually(lambda: len(recorded.results) == 2000)
    thread.join(60)
    assert [result.base_length for result in recorded.results] == list(range(2000))
    assert len(recorded.frames) < 2000
    assert recorded.link.load.free_pages == 0, "a newer load replaces an older one, zeros included"


async def test_an_open_sent_after_a_close_is_in_a_later_frame(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    recorded.link.send(opens=[OpenSequence(sequence_id=1)], blocks=[block(1)])
    recorded.link.send(closes=[CloseSequence(sequence_id=1)])
    recorded.link.send(opens=[OpenSequence(sequence_id=2)])
    await eventually(lambda: len(worker.handler.requests) == 2)
    first, second = worker.handler.requests
    assert [len(first.opens), len(first.blocks), len(first.closes)] == [1, 1, 1]
    assert [entry.sequence_id for entry in second.opens] == [2]


async def test_the_hello_of_the_worker_arrives_whole(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    expected = WorkerHello()
    expected.CopyFrom(HELLO)
    expected.protocol_version = 1
    assert recorded.link.hello == expected
