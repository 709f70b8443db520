"""The link against real servers: coalescing, order, faults that stay in one link, reconnecting, draining."""

import asyncio
import threading
from unittest.mock import Mock

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
from betoken.rpc.link import DraftLink, LinkCallbacks, LinkOptions, LinkState, OutboxLimits, VerifyLink, router_side
from betoken.rpc.link.backoff import Backoff
from betoken.rpc.link.options import open_channel
from betoken.v1.types_pb2 import CloseSequence, LinkError, OpenSequence, RouterHello, WorkerHello
from betoken.v1.verify_pb2 import DraftBlock, Verdict, VerifyLinkRequest, VerifyLinkResponse

from .conftest import HELLO, eventually

GOOD_HELLO = VerifyLinkRequest(hello=RouterHello(protocol_version=1, router_id="r")).SerializeToString()


def block(sequence_id: int, num_drafts: int = 4) -> DraftBlock:
    return DraftBlock(sequence_id=sequence_id, base_length=10, draft_ids=range(num_drafts))


async def status_of(call) -> Exception:
    """The typed error the stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            while await call.read() is not grpc.aio.EOF:
                pass
    return from_rpc_error(caught.value)


async def test_entries_of_one_turn_leave_as_one_frame(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    for sequence_id in range(1, 65):
        recorded.link.send(blocks=[block(sequence_id)])
    await eventually(lambda: len(recorded.verdicts) == 64)
    assert len(worker.handler.requests) == 1
    assert len(recorded.frames) == 1
    assert [verdict.sequence_id for verdict in recorded.verdicts] == list(range(1, 65))
    assert recorded.link.load.running == 64


async def test_a_link_takes_no_proxy(start_worker, start_link, monkeypatch):
    monkeypatch.delenv("no_grpc_proxy")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    worker = await start_worker()
    recorded = await start_link(worker.address)
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.verdicts)


async def test_frames_sent_from_another_thread_arrive_in_order_and_coalesce(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    peer = worker.handler.links[0]

    def engine() -> None:
        for step in range(2000):
            frame = VerifyLinkResponse(verdicts=[Verdict(sequence_id=1, base_length=step)])
            frame.load.free_pages = 2000 - step - 1
            peer.send(frame)

    thread = threading.Thread(target=engine)
    thread.start()
    await eventually(lambda: len(recorded.verdicts) == 2000)
    thread.join()
    assert [verdict.base_length for verdict in recorded.verdicts] == list(range(2000))
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
    await eventually(lambda: recorded.verdicts)
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
    await eventually(lambda: recorded.verdicts)
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


async def test_a_worker_s_oversized_frame_ends_the_link(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    worker.handler.links[0].send(VerifyLinkResponse(errors=[LinkError(sequence_id=1, message="x" * (5 << 20))]))
    await eventually(lambda: recorded.downs)
    assert isinstance(recorded.downs[0], ResourceExhaustedError)
    assert not recorded.verdicts


async def test_a_router_that_says_nothing_is_cut_off(start_worker, raw_call):
    worker = await start_worker(handshake_timeout_s=0.1)
    call = raw_call(worker.address)
    assert "no hello within 0.1 s" in str(await status_of(call))


async def test_an_old_channel_is_given_up_with_the_first_failed_dial(start_worker, start_link, monkeypatch):
    channels = []

    def opened(*args):
        channels.append(open_channel(*args))
        return channels[-1]

    monkeypatch.setattr(router_side, "open_channel", opened)
    monkeypatch.setattr(router_side, "_CHANNEL_AGE_S", 60.0)
    worker = await start_worker()
    recorded = await start_link(worker.address)
    await worker.server.stop(None)
    await asyncio.sleep(0.5)  # dials fail
    assert len(channels) == 1  # young
    monkeypatch.setattr(router_side, "_CHANNEL_AGE_S", 0.2)
    await eventually(lambda: len(channels) > 1)
    await start_worker(worker.port)
    await eventually(lambda: recorded.ups == 2)
    assert recorded.link._channel is channels[-1]


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


async def test_a_router_fault_costs_its_link_only(start_worker, start_link):
    def on_frame(frame):
        raise RuntimeError("a bug in the router")

    worker = await start_worker()
    recorded = await start_link(worker.address, on_frame=on_frame)
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.ups == 2)
    assert isinstance(recorded.downs[0], InternalError)


async def test_a_link_comes_back_after_the_worker_restarts(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    await worker.server.stop(None)
    await eventually(lambda: recorded.downs)
    assert recorded.link.state is LinkState.CONNECTING
    assert recorded.link.detail
    with pytest.raises(UnavailableError, match="is not connected"):
        recorded.link.send(blocks=[block(1)])
    recorded.link.send(closes=[CloseSequence(sequence_id=1)])  # nothing to close there any more
    await asyncio.sleep(0.3)
    again = await start_worker(port=worker.port, hello=WorkerHello(role="verify", worker_id="w2"))
    await eventually(lambda: recorded.ups == 2)
    assert recorded.link.state is LinkState.READY
    assert recorded.link.hello.worker_id == "w2"
    recorded.link.send(blocks=[block(5)])
    await eventually(lambda: recorded.verdicts)
    assert len(again.handler.requests) == 1
    assert len(recorded.downs) == 1


async def test_a_dead_router_frees_its_sequences(start_worker, raw_call):
    worker = await start_worker()
    call = raw_call(worker.address)
    await call.write(GOOD_HELLO)
    await call.read()
    await eventually(lambda: worker.handler.links)  # else the cancel may come first, and nothing was opened
    call.cancel()
    await eventually(lambda: worker.handler.closed == [1])
    assert worker.num_links == 0


async def test_a_worker_that_does_not_fit_is_refused_and_dialled_again(start_worker, start_link):
    def check_hello(hello: WorkerHello) -> None:
        if hello.tokenizer_hash != "good":
            raise FailedPreconditionError("tokenizer_hash: differs")

    worker = await start_worker()
    recorded = await start_link(worker.address, check_hello=check_hello, wait=False)
    await eventually(lambda: recorded.link.state is LinkState.REFUSED)
    assert recorded.link.detail == "tokenizer_hash: differs"
    assert recorded.ups == 0
    await worker.server.stop(None)
    fitting = WorkerHello(role="verify", worker_id="w2", tokenizer_hash="good")
    await start_worker(port=worker.port, hello=fitting)
    await eventually(lambda: recorded.link.state is LinkState.READY)
    assert recorded.downs == []


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


async def test_a_refused_worker_is_left_alone_until_there_is_reason_to_ask(start_worker, start_link, clock):
    num_checks = [0]

    def check_hello(hello: WorkerHello) -> None:
        num_checks[0] += 1
        raise FailedPreconditionError("tokenizers differ")

    async def next_check() -> None:
        before = num_checks[0]
        await eventually(lambda: num_checks[0] > before and recorded.link.state is LinkState.REFUSED)

    worker = await start_worker()
    recorded = await start_link(worker.address, check_hello=check_hello, wait=False)
    for _ in range(12):  # from 20 ms on, each twice as long
        await next_check()
        clock.advance(120.0)
    await asyncio.sleep(0.3)  # long enough for three of the usual pauses
    before = num_checks[0]
    await asyncio.sleep(0.3)
    assert num_checks[0] == before
    recorded.link.dial_soon()
    await next_check()
    await worker.server.stop(None)
    await start_worker(port=worker.port)
    await next_check()


async def test_pauses_between_dials_double_up_to_their_bounds(monkeypatch):
    slept: list[float] = []

    async def sleep(_: Backoff, seconds: float) -> bool:
        slept.append(seconds)
        return False

    monkeypatch.setattr(Backoff, "_sleep", sleep)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    backoff = Backoff(LinkOptions())
    for _ in range(8):
        await backoff.pause()
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    backoff.reset()
    pauses = []
    for _ in range(20):
        slept.clear()
        await backoff.pause(Mock(get_state=lambda: grpc.ChannelConnectivity.READY))
        pauses.append(sum(slept))
    assert pauses[0] == 0.2 and pauses[-1] == 65.0 and sum(pauses) > 600.0, "ten minutes have few dials"
    slept.clear()
    await backoff.pause(Mock(get_state=lambda: grpc.ChannelConnectivity.IDLE))
    assert slept == [5.0], "the worker's process has ended"


async def test_an_address_of_another_service_is_refused_and_stays_so(start_worker):
    worker = await start_worker()
    link = DraftLink(worker.address, LinkCallbacks(print, print, print, print))
    for _ in range(30):
        with pytest.raises(FailedPreconditionError, match="no draft worker listens there: another gRPC service does"):
            await link.connect_once()
        assert link.state is LinkState.REFUSED
    await link.close()


async def test_a_link_closes_at_once_while_it_asks_who_listens_there():
    asked = asyncio.Event()

    class Silent(grpc.GenericRpcHandler):
        def service(self, call):
            return grpc.unary_unary_rpc_method_handler(self.hang) if "Health" in call.method else None

        async def hang(self, request, context):
            asked.set()
            await asyncio.sleep(60)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Silent(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = VerifyLink(f"127.0.0.1:{port}", LinkCallbacks(print, print, print, print))
    running = asyncio.ensure_future(link.run())
    await asked.wait()
    async with asyncio.timeout(20):
        await link.close()
        await running
    await server.stop(0)


async def test_a_status_whose_advice_is_no_time_costs_no_link():
    class Full(grpc.GenericRpcHandler):
        def service(self, call):
            return grpc.stream_stream_rpc_method_handler(self.refuse)

        async def refuse(self, frames, context):
            metadata = (("betoken-retry-after-ms", "9" * 400),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Full(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = VerifyLink(f"127.0.0.1:{port}", LinkCallbacks(print, print, print, print))
    with pytest.raises(ResourceExhaustedError, match="full") as refused:
        await link.connect_once()
    assert refused.value.retry_after_s is None
    await link.close()
    await server.stop(0)


async def test_a_status_that_a_write_came_too_late_for_is_found(start_worker, monkeypatch):
    worker = await start_worker(max_links=0)
    link = VerifyLink(worker.address, LinkCallbacks(print, print, print, print))

    async def late(call, frame):
        await call.code()  # the server has ended the call
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "from Core")

    monkeypatch.setattr(grpc.aio._call.StreamStreamCall, "write", late)
    with pytest.raises(ResourceExhaustedError, match="0 links are open"):
        await link.connect_once()
    await link.close()


async def test_connect_once_reports_its_failure_and_run_takes_over(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    assert await recorded.link.connect_once() == recorded.link.hello, "at once when connected"
    await worker.server.stop(None)
    await eventually(lambda: recorded.downs)
    with pytest.raises(UnavailableError):
        await recorded.link.connect_once()


async def test_close_before_run_and_while_dialling(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    await recorded.link.close()
    assert recorded.link.state is LinkState.CLOSED
    assert len(recorded.downs) == 1
    is_dialled = asyncio.Event()
    silent = await asyncio.start_server(lambda reader, writer: is_dialled.set(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    dialling = await start_link(f"127.0.0.1:{port}", wait=False)
    await eventually(is_dialled.is_set)
    async with asyncio.timeout(1.5):  # the dial's own time is over later
        await dialling.link.close()
    assert dialling.link.state is LinkState.CLOSED
    silent.close()


async def test_a_link_closes_in_the_turn_in_which_its_dial_is_over_time(start_worker, monkeypatch):
    async def hang(call, frame):
        await asyncio.sleep(60)

    monkeypatch.setattr(grpc.aio._call.StreamStreamCall, "write", hang)
    worker = await start_worker()
    link = VerifyLink(worker.address, LinkCallbacks(print, print, print, print), LinkOptions(connect_timeout_s=0.2))
    running = asyncio.ensure_future(link.run())
    while link._dial_timeout is None or not link._dial_timeout.expired():  # noqa: ASYNC110 (every turn counts)
        await asyncio.sleep(0)
    await link.close()
    await running
    assert link.state is LinkState.CLOSED


async def test_a_worker_that_hangs_loses_its_link(start_worker, start_link):
    worker = await start_worker()
    flows = asyncio.Event()
    flows.set()

    async def relay(reader, writer):
        try:
            while data := await reader.read(1 << 16):
                await flows.wait()
                writer.write(data)
        finally:
            writer.close()

    async def accept(reader, writer):
        worker_reader, worker_writer = await asyncio.open_connection("127.0.0.1", worker.port)
        await asyncio.gather(relay(reader, worker_writer), relay(worker_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as relaying:
        address = f"127.0.0.1:{relaying.sockets[0].getsockname()[1]}"
        recorded = await start_link(address, keepalive_time_s=1.0, keepalive_timeout_s=0.5)
        flows.clear()
        await eventually(lambda: recorded.downs)
        assert isinstance(recorded.downs[0], UnavailableError)
        flows.set()
        await recorded.link.close()


async def test_a_draining_worker_is_left_when_its_last_sequence_closes(start_worker, start_link):
    worker = await start_worker()
    idle, busy = await start_link(worker.address), await start_link(worker.address)
    busy.link.send(opens=[OpenSequence(sequence_id=1)])
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(worker.servicer.drain(60.0, "test"))
        await eventually(lambda: busy.link.state is LinkState.DRAINING and idle.downs)
        assert busy.link.detail == "test"
        busy.link.send(blocks=[block(1)])
        await eventually(lambda: busy.verdicts)
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


async def test_a_drain_ends_what_is_left_after_the_grace(start_worker, start_link):
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
    await eventually(lambda: recorded.verdicts)
    assert recorded.downs == []


async def test_an_entry_too_large_to_send_is_refused_alone(start_worker, start_link):
    worker = await start_worker()
    limits = OutboxLimits(max_frame_bytes=1000, max_message_bytes=2000)
    recorded = await start_link(worker.address, limits=limits)
    with pytest.raises(ResourceExhaustedError, match="limit of 2000 bytes"):
        recorded.link.send(opens=[OpenSequence(sequence_id=1, prompt_ids=[40] * 3000)])
    with pytest.raises(ResourceExhaustedError, match="limit of 2000 bytes"):
        recorded.link.send(blocks=[block(1), block(2, 3000)])
    await eventually(lambda: recorded.verdicts)  # of the entry before the refused one
    recorded.link.send(blocks=[block(3)])
    await eventually(lambda: len(recorded.verdicts) == 2)
    assert recorded.link.is_up


async def test_the_backlog_of_a_link_is_bounded(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address, limits=OutboxLimits(max_pending_bytes=10_000))
    with pytest.raises(UnavailableError, match="does not read"):
        for sequence_id in range(1, 1000):
            recorded.link.send(blocks=[block(sequence_id, 50)])
    await eventually(lambda: recorded.ups == 2)
    assert "does not read" in str(recorded.downs[0])


async def test_the_hello_of_the_worker_arrives_whole(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    expected = WorkerHello()
    expected.CopyFrom(HELLO)
    expected.protocol_version = 1
    assert recorded.link.hello == expected
