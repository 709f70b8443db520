"""The worker's side of links: bad frames end their own link, links are bounded, drains are announced."""

import asyncio

import grpc
import pytest

from betoken.common.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    from_rpc_error,
)
from betoken.rpc.link import LinkState, OutboxLimits
from betoken.v1.types_pb2 import CloseSequence, LinkError, OpenSequence, RouterHello, WorkerHello
from betoken.v1.verify_pb2 import VerifyLinkRequest, VerifyLinkResponse
from tests.rpc.harness import block

from .conftest import eventually

GOOD_HELLO = VerifyLinkRequest(hello=RouterHello(protocol_version=1, router_id="r")).SerializeToString()


async def status_of(call) -> Exception:
    """The typed error the stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            while await call.read() is not grpc.aio.EOF:
                pass
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("first_frame", "error_type", "text"),
    [
        (b"\xff\xff\xff\xff", InvalidArgumentError, "undecodable"),
        (b"", InvalidArgumentError, "hello = absent"),
        (VerifyLinkRequest(blocks=[block(1)]).SerializeToString(), InvalidArgumentError, "hello = absent"),
        (
            VerifyLinkRequest(hello=RouterHello(protocol_version=2)).SerializeToString(),
            FailedPreconditionError,
            "hello.protocol_version = 2",
        ),
        (
            VerifyLinkRequest(hello=RouterHello(protocol_version=1, router_id="x" * 129)).SerializeToString(),
            InvalidArgumentError,
            "must be at most 128 bytes",
        ),
        (
            VerifyLinkRequest(hello=RouterHello(protocol_version=1), blocks=[block(1)]).SerializeToString(),
            InvalidArgumentError,
            "alone in the first frame",
        ),
    ],
)
async def test_a_bad_first_frame_ends_that_link_only(start_worker, start_link, raw_call, first_frame, error_type, text):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    call = raw_call(worker.address)
    await call.write(first_frame)
    error = await status_of(call)
    assert isinstance(error, error_type)
    assert text in str(error)
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.results)
    assert recorded.downs == []


@pytest.mark.parametrize(
    ("frame", "text"), [(b"\x0a\xff\xff\xff\xff\x0f", "undecodable"), (GOOD_HELLO, "first frame only")]
)
async def test_garbage_after_the_handshake_ends_that_link_only(start_worker, start_link, raw_call, frame, text):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    call = raw_call(worker.address)
    await call.write(GOOD_HELLO)
    assert (await call.read()).hello.worker_id == "w1"
    await call.write(frame)
    error = await status_of(call)
    assert isinstance(error, InvalidArgumentError)
    assert text in str(error)
    await eventually(lambda: worker.handler.closed == [2])
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.results)
    assert recorded.downs == []


async def test_an_oversized_frame_ends_that_link_only(start_worker, start_link, raw_call):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    call = raw_call(worker.address)
    await call.write(GOOD_HELLO)
    await call.read()
    await call.write(b"\x00" * (5 << 20))  # above gRPC's default limit of 4 MiB
    assert isinstance(await status_of(call), ResourceExhaustedError)
    await eventually(lambda: worker.handler.closed == [2])
    assert recorded.downs == []


async def test_a_router_without_a_hello_is_disconnected(start_worker, raw_call):
    worker = await start_worker(handshake_timeout_s=0.1)
    call = raw_call(worker.address)
    assert "no hello within 0.1 s" in str(await status_of(call))


async def test_links_are_bounded(start_worker, start_link, raw_call):
    worker = await start_worker(max_links=1)
    await start_link(worker.address)
    assert isinstance(await status_of(raw_call(worker.address)), ResourceExhaustedError)


def begun_links(worker, monkeypatch) -> list:
    """Gets an item for each call that has reached the worker, before its hello."""
    begun = []
    check_room = worker.servicer._check_room
    monkeypatch.setattr(worker.servicer, "_check_room", lambda: (begun.append(1), check_room()))
    return begun


async def test_links_are_bounded_when_many_begin_at_once(start_worker, raw_call, monkeypatch):
    worker = await start_worker(max_links=2)
    begun = begun_links(worker, monkeypatch)
    calls = [raw_call(worker.address) for _ in range(6)]
    await eventually(lambda: len(begun) == 6)  # and none has said hello
    for call in calls:
        await call.write(GOOD_HELLO)
    frames = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
    assert sum(isinstance(frame, VerifyLinkResponse) for frame in frames) == 2
    assert worker.num_links == 2


async def test_a_handler_fault_is_opaque_and_costs_its_link_only(start_worker, start_link, caplog):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    worker.handler.fault = ValueError("secret")
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.downs)
    worker.handler.fault = None
    assert isinstance(recorded.downs[0], InternalError)
    assert "secret" not in str(recorded.downs[0])
    assert recorded.downs[0].request_id in caplog.text
    await eventually(lambda: recorded.ups == 2)
    assert worker.handler.closed == [1]


async def test_a_dead_router_frees_its_sequences(start_worker, raw_call):
    worker = await start_worker()
    call = raw_call(worker.address)
    await call.write(GOOD_HELLO)
    await call.read()
    await eventually(lambda: worker.handler.links)  # else the cancel may come first, and nothing was opened
    call.cancel()
    await eventually(lambda: worker.handler.closed == [1])
    assert worker.num_links == 0


def lines_of_the_worker(caplog) -> list[tuple[str, str]]:
    name = "betoken.rpc.link.worker_side"
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == name]


async def test_a_refused_worker_learns_why_and_logs_it_once(start_worker, start_link, caplog, clock):
    caplog.set_level("INFO", "betoken")
    reasons, num_checks = ["tokenizers differ"], [0]

    def check_hello(hello: WorkerHello) -> None:
        num_checks[0] += 1
        if reasons:
            raise FailedPreconditionError(reasons[-1])

    worker = await start_worker()
    options = {"check_hello": check_hello, "max_refused_backoff_s": 0.02, "router_id": "r1"}
    recorded = await start_link(worker.address, **options, wait=False)
    await eventually(lambda: num_checks[0] >= 5)
    (_, first), (level, told) = lines_of_the_worker(caplog)
    assert first.endswith(" is up")
    assert level == "WARNING" and "router r1 at " in told and told.endswith(" refuses this worker: tokenizers differ")
    reasons.append("another model")
    await eventually(lambda: len(lines_of_the_worker(caplog)) == 3)
    assert lines_of_the_worker(caplog)[2][1].endswith(" refuses this worker: another model")
    reasons.clear()
    await eventually(lambda: recorded.ups)
    clock.advance(6.0)  # what is not refused for so long has been taken
    await eventually(lambda: len(lines_of_the_worker(caplog)) == 4)
    assert lines_of_the_worker(caplog)[3][1].endswith(" is up")
    warnings = [record for record in caplog.records if record.name == "betoken.rpc.link.router_side"]
    assert len(warnings) == 3, "each reason, and that it is up"


async def test_a_draining_worker_is_left_when_its_last_sequence_closes(start_worker, start_link):
    worker = await start_worker()
    idle, busy = await start_link(worker.address), await start_link(worker.address)
    busy.link.send(opens=[OpenSequence(sequence_id=1)])
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(worker.servicer.drain(60.0, "test"))
        await eventually(lambda: busy.link.state is LinkState.DRAINING and idle.downs)
        assert busy.link.detail == "test"
        busy.link.send(blocks=[block(1)])
        await eventually(lambda: busy.results)
        assert not draining.done()
        busy.link.send(closes=[CloseSequence(sequence_id=1)])
        await eventually(draining.done)
    assert worker.num_links == 0
    with pytest.raises(UnavailableError, match="worker: test"):
        await idle.link.connect_once()


async def test_a_link_whose_handshake_falls_into_a_drain_is_notified(start_worker, start_link, raw_call, monkeypatch):
    worker = await start_worker()
    busy = await start_link(worker.address)
    busy.link.send(opens=[OpenSequence(sequence_id=1)])
    begun = begun_links(worker, monkeypatch)
    late = raw_call(worker.address)
    await eventually(lambda: begun)  # the call is there, its hello is not
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.servicer.drain(60.0, "test"))
        await eventually(lambda: busy.link.state is LinkState.DRAINING)
        await late.write(GOOD_HELLO)
        assert (await late.read()).HasField("hello")
        async with asyncio.timeout(30):
            assert (await late.read()).drain.reason == "test"
        busy.link.send(closes=[CloseSequence(sequence_id=1)])
        late.cancel()


async def test_a_drain_ends_remaining_links_after_the_grace(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    recorded.link.send(opens=[OpenSequence(sequence_id=1)])
    await worker.servicer.drain(0.1, "test")
    assert worker.num_links == 0
    await eventually(lambda: recorded.downs)
    assert str(recorded.downs[0]) == "worker: test"


async def test_a_router_that_does_not_read_loses_its_link_only(start_worker, start_link, raw_call):
    worker = await start_worker(limits=OutboxLimits(max_frame_bytes=1 << 20, max_pending_bytes=8 << 20))
    recorded = await start_link(worker.address)
    call = raw_call(worker.address)
    await call.write(GOOD_HELLO)
    await call.read()
    await eventually(lambda: len(worker.handler.links) == 2)
    peer = worker.handler.links[1]
    for _ in range(200):
        peer.send(VerifyLinkResponse(errors=[LinkError(sequence_id=1, message="x" * 500_000)]))
        await asyncio.sleep(0)
    await eventually(lambda: worker.handler.closed == [2])
    peer.send(VerifyLinkResponse())  # to a link that is gone: dropped
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.results)
    assert recorded.downs == []
