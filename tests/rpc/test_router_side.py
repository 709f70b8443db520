"""The router's side of links: dials, backoff, refused workers, reconnecting, closing."""

import asyncio
from unittest.mock import Mock

import grpc
import pytest

from betoken.common.errors import (
    FailedPreconditionError,
    InternalError,
    LoadingError,
    ResourceExhaustedError,
    UnavailableError,
)
from betoken.rpc.link import (
    DraftLink,
    LinkCallbacks,
    LinkOptions,
    LinkState,
    LoadingServicer,
    OutboxLimits,
    VerifyLink,
    router_side,
)
from betoken.rpc.link.backoff import Backoff
from betoken.rpc.link.options import open_channel
from betoken.v1.types_pb2 import CloseSequence, LinkError, OpenSequence, WorkerHello
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.rpc.harness import block

from .conftest import eventually


async def test_a_link_takes_no_proxy(start_worker, start_link, monkeypatch):
    monkeypatch.delenv("no_grpc_proxy")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    worker = await start_worker()
    recorded = await start_link(worker.address)
    recorded.link.send(blocks=[block(1)])
    await eventually(lambda: recorded.results)


async def test_a_worker_s_oversized_frame_ends_the_link(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    worker.handler.links[0].send(VerifyLinkResponse(errors=[LinkError(sequence_id=1, message="x" * (5 << 20))]))
    await eventually(lambda: recorded.downs)
    assert isinstance(recorded.downs[0], ResourceExhaustedError)
    assert not recorded.results


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
    await eventually(lambda: recorded.results)
    assert len(again.handler.requests) == 1
    assert len(recorded.downs) == 1


async def test_a_link_reports_the_progress_of_a_loading_worker_until_it_is_up(start_worker, start_link):
    progress = LoadingError("packing weights", 0.25)
    early = LoadingServicer(lambda: progress)
    worker = await start_worker(early=early)
    recorded = await start_link(worker.address, wait=False)
    await eventually(lambda: recorded.link.state is LinkState.LOADING)
    assert recorded.link.loading.fraction == 0.25
    progress = LoadingError("compiling", 0.5)
    await eventually(lambda: recorded.link.detail == "compiling")
    early.loaded(worker.servicer)
    await eventually(lambda: recorded.ups)
    assert recorded.link.loading is None and recorded.num_loads == 1


async def test_an_incompatible_worker_is_rejected_and_dialled_again(start_worker, start_link):
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


async def test_backoff_between_dials_doubles_up_to_its_bound(monkeypatch):
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


async def test_a_link_closes_at_once_during_its_diagnosis_of_the_address():
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


async def test_a_status_with_invalid_retry_advice_does_not_break_the_link():
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


async def test_the_status_of_a_call_that_ended_before_a_write_is_found(start_worker, monkeypatch):
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
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{worker.port}"):
        await recorded.link.connect_once()


async def test_a_link_closes_before_its_run_and_while_dialling(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address)
    await recorded.link.close()
    assert recorded.link.state is LinkState.CLOSED
    assert len(recorded.downs) == 1
    is_dialled = asyncio.Event()
    silent = await asyncio.start_server(lambda reader, writer: is_dialled.set(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    dialling = await start_link(f"127.0.0.1:{port}", wait=False, connect_timeout_s=60.0)
    await eventually(is_dialled.is_set)
    async with asyncio.timeout(30):  # the dial's own time is over later
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


async def test_an_entry_too_large_to_send_is_refused_alone(start_worker, start_link):
    worker = await start_worker()
    limits = OutboxLimits(max_frame_bytes=1000, max_message_bytes=2000)
    recorded = await start_link(worker.address, limits=limits)
    with pytest.raises(ResourceExhaustedError, match="limit of 2000 bytes"):
        recorded.link.send(opens=[OpenSequence(sequence_id=1, prompt_ids=[40] * 3000)])
    with pytest.raises(ResourceExhaustedError, match="limit of 2000 bytes"):
        recorded.link.send(blocks=[block(1), block(2, 3000)])
    await eventually(lambda: recorded.results)  # of the entry before the refused one
    recorded.link.send(blocks=[block(3)])
    await eventually(lambda: len(recorded.results) == 2)
    assert recorded.link.is_up


async def test_the_backlog_of_a_link_is_bounded(start_worker, start_link):
    worker = await start_worker()
    recorded = await start_link(worker.address, limits=OutboxLimits(max_pending_bytes=10_000))
    with pytest.raises(UnavailableError, match="does not read"):
        for sequence_id in range(1, 1000):
            recorded.link.send(blocks=[block(sequence_id, 50)])
    await eventually(lambda: recorded.ups == 2)
    assert "does not read" in str(recorded.downs[0])
