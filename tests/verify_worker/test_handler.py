"""The verify worker over real gRPC links: bad entries and garbage disturb no other link, closing frees every page."""

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from betoken.common import names
from betoken.common.errors import from_link_error
from betoken.engine.model_thread import ModelThread
from betoken.rpc.link import LinkServicer
from betoken.v1 import verify_pb2_grpc
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_TYPICAL,
    CloseSequence,
    LogitBias,
    OpenSequence,
    RouterHello,
    SamplingParams,
    WorkerHello,
)
from betoken.v1.verify_pb2 import DraftBlock, VerifyLinkRequest, VerifyLinkResponse
from betoken.verify_worker.core import VerifyCore
from betoken.verify_worker.handler import VerifyLinkHandler, VerifyResults
from betoken.verify_worker.scheduler import Scheduler

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
async def worker(fake_runner_class):
    """(address, runner) of a verify worker whose model is the fake one."""
    runner = fake_runner_class()
    results = VerifyResults()
    hello = WorkerHello(
        role="verify",
        worker_id="w1",
        vocab_size=runner.vocab_size,
        max_context=256,
        max_draft_tokens=8,
        supports_trees=True,
        verification_modes=[VERIFICATION_MODE_COUPLED],
    )
    thread = ModelThread(lambda: VerifyCore(runner, Scheduler(runner.page_table, 32, 8), results, 8), "fake")
    await asyncio.wrap_future(thread.start())
    servicer = LinkServicer(lambda: hello, VerifyLinkHandler(thread.submit, results, hello), VerifyLinkResponse)
    server = grpc.aio.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", runner
    await server.stop(0)
    thread.stop(5)


class Link:
    def __init__(self, call):
        self.call = call
        self.frames = []

    async def send(self, **entries):
        await self.call.write(VerifyLinkRequest(**entries))

    async def until(self, found):
        """The first frame, read or yet to come, for which `found` is true."""
        async with asyncio.timeout(20):
            while True:
                for frame in self.frames:
                    if found(frame):
                        return frame
                frame = await self.call.read()
                assert frame is not grpc.aio.EOF, "the link ended"
                self.frames.append(frame)

    async def error(self, sequence_id):
        frame = await self.until(lambda frame: any(e.sequence_id == sequence_id for e in frame.errors))
        return from_link_error(next(e for e in frame.errors if e.sequence_id == sequence_id))

    async def tokens(self, sequence_id, count):
        def emitted():
            results = [v for f in self.frames for v in f.results if v.sequence_id == sequence_id]
            return [v.next_id for v in results]

        await self.until(lambda _: len(emitted()) >= count)
        return emitted()[:count]


@asynccontextmanager
async def link_to(address):
    async with grpc.aio.insecure_channel(address) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Link()
        await call.write(VerifyLinkRequest(hello=RouterHello(protocol_version=1, router_id="test")))
        link = Link(call)
        await link.until(lambda frame: frame.HasField("hello"))
        yield link
        call.cancel()


def opening(sequence_id, **fields):
    values = {"prompt_ids": PROMPT, "max_length": 100, "sampling": SamplingParams(temperature=0)}
    return OpenSequence(**(values | {"sequence_id": sequence_id} | fields))


def grant(sequence_id, num_plain_steps=5):
    return DraftBlock(sequence_id=sequence_id, base_length=len(PROMPT), num_plain_steps=num_plain_steps)


async def test_a_sequences_span_names_its_worker(worker, exported):
    async with link_to(worker[0]) as link:
        await link.send(opens=[opening(1)], blocks=[grant(1, 1)])
        await link.tokens(1, 1)
        await link.send(closes=[CloseSequence(sequence_id=1)])
        async with asyncio.timeout(20):
            while not (spans := exported.get_finished_spans()):  # noqa: ASYNC110 (another thread ends it)
                await asyncio.sleep(0.005)
    attributes = spans[0].attributes
    assert (attributes[names.WORKER_ROLE], attributes[names.WORKER_ID]) == ("verify", "w1")


async def test_a_tree_s_result_names_the_accepted_path(worker):
    address, runner = worker
    truth = runner.complete(PROMPT, 3)
    block = DraftBlock(
        sequence_id=1, base_length=len(PROMPT), draft_ids=[truth[0], 9, truth[1], 9], parents=[-1, -1, 0, 1]
    )
    async with link_to(address) as link:
        await link.send(opens=[opening(1)], blocks=[block])
        frame = await link.until(lambda frame: frame.results)
    (result,) = frame.results
    assert (list(result.path), result.num_accepted, result.next_id) == ([0, 2], 2, truth[2])


async def test_an_open_and_its_block_in_one_frame_give_the_target_s_tokens(worker):
    address, runner = worker
    truth = runner.complete(PROMPT, 4)
    async with link_to(address) as link:
        block = DraftBlock(sequence_id=1, base_length=5, draft_ids=truth[:3])
        await link.send(opens=[opening(1)], blocks=[block])
        frame = await link.until(lambda frame: frame.results)
        (result,) = frame.results
        assert (result.num_accepted, result.next_id, result.base_length) == (3, truth[3], 5)
        assert result.forward_ns > 0


BAD_OPENS = {
    "open.prompt_ids": {"prompt_ids": []},
    "open.prompt_ids[1]": {"prompt_ids": [1, 97]},
    "open.max_length": {"max_length": 5},
    "open.sampling.temperature": {"sampling": SamplingParams(temperature=-1.0)},
    "open.sampling.top_p": {"sampling": SamplingParams(temperature=0, top_p=float("nan"))},
    "open.sampling.logit_bias[0].token_id": {
        "sampling": SamplingParams(temperature=0, logit_bias=[LogitBias(token_id=97, bias=1.0)])
    },
    "open.sampling.seed": {"sampling": SamplingParams(temperature=1.0)},
    "open.sampling.min_new_tokens": {"sampling": SamplingParams(temperature=0, min_new_tokens=96)},
    "open.mode": {"mode": VERIFICATION_MODE_TYPICAL},
}


@pytest.mark.parametrize("field", BAD_OPENS)
async def test_a_bad_open_is_refused_by_name_while_another_sequence_goes_on(worker, field):
    address, runner = worker
    async with link_to(address) as link:
        await link.send(opens=[opening(1), opening(2, **BAD_OPENS[field])], blocks=[grant(1)])
        error = await link.error(2)
        assert error.field == field
        assert error.limit
        assert await link.tokens(1, 5) == runner.complete(PROMPT, 5)


async def test_a_deadline_beyond_the_longest_wait_of_a_thread_is_accepted(worker):
    address, runner = worker
    async with link_to(address) as link:
        await link.send(opens=[opening(1, deadline_ms=(1 << 64) - 1)], blocks=[grant(1)])
        await link.tokens(1, 5)  # now the model's thread waits
        await link.send(opens=[opening(2)], blocks=[grant(2)])
        assert await link.tokens(2, 5) == runner.complete(PROMPT, 5)


@pytest.mark.parametrize(
    ("field", "block"),
    [
        ("block.draft_ids[1]", {"draft_ids": [1, 97]}),
        ("block.draft_ids", {"draft_ids": [1] * 9}),
        ("block.num_plain_steps", {"num_plain_steps": 1025}),
        ("block.parents[1]", {"draft_ids": [1, 2], "parents": [-1, 1]}),
    ],
)
async def test_a_bad_block_ends_its_sequence_only(worker, field, block):
    address, runner = worker
    async with link_to(address) as link:
        await link.send(opens=[opening(1), opening(2)])
        await link.send(blocks=[DraftBlock(sequence_id=2, base_length=5, **block), grant(1)])
        assert (await link.error(2)).field == field
        assert await link.tokens(1, 5) == runner.complete(PROMPT, 5)


async def test_garbage_on_one_link_does_not_disturb_other_links(worker):
    address, runner = worker
    async with link_to(address) as link, grpc.aio.insecure_channel(address) as channel:
        garbage = channel.stream_stream("/betoken.v1.VerifyService/Link")()
        await garbage.write(b"\xff\xff\xff\xff not a frame")
        with pytest.raises(grpc.aio.AioRpcError):
            async with asyncio.timeout(10):
                while await garbage.read() is not grpc.aio.EOF:
                    pass
                raise await _status_error(garbage)
        await link.send(opens=[opening(1)], blocks=[grant(1)])
        assert await link.tokens(1, 5) == runner.complete(PROMPT, 5)


@pytest.mark.parametrize("kind", [b"\x12\x00", b"\x1a\x00", b"\x22\x00"], ids=["opens", "blocks", "closes"])
async def test_a_frame_of_countless_entries_ends_its_link_and_holds_up_no_other(worker, kind):
    address, runner = worker
    async with link_to(address) as link, grpc.aio.insecure_channel(address) as channel:
        hostile = channel.stream_stream("/betoken.v1.VerifyService/Link")()
        await hostile.write(VerifyLinkRequest(hello=RouterHello(protocol_version=1)).SerializeToString())
        await hostile.write(kind * 100_000)
        with suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(20):
                while await hostile.read() is not grpc.aio.EOF:
                    pass
        assert await hostile.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await hostile.details() == "frame = 100000 entries: must be at most 65536 of a kind"
        await link.send(opens=[opening(1)], blocks=[grant(1)])
        assert await link.tokens(1, 5) == runner.complete(PROMPT, 5)


async def _status_error(call):
    return grpc.aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata())


async def test_all_pages_are_free_after_close_and_after_a_broken_link(worker):
    address, runner = worker
    async with link_to(address) as link:
        await link.send(opens=[opening(1), opening(2)], blocks=[grant(1, 50), grant(2, 50)])
        await link.tokens(2, 3)
        await link.send(closes=[CloseSequence(sequence_id=1)])
        await link.send(opens=[opening(3)], blocks=[grant(3)])
        assert await link.tokens(3, 5) == runner.complete(PROMPT, 5)
    async with link_to(address) as watcher:
        await watcher.send(opens=[opening(9)], blocks=[grant(9)])
        await watcher.tokens(9, 5)
        await watcher.send(closes=[CloseSequence(sequence_id=9)])
        frame = await watcher.until(lambda frame: frame.load.total_pages and frame.load.free_pages == 64)
        assert frame.load.total_pages == 64


async def test_every_router_receives_the_load_after_an_open(worker):
    address, _ = worker
    async with link_to(address) as idle, link_to(address) as link:
        await link.send(opens=[opening(1), opening(2)], blocks=[grant(1), grant(2)])
        await link.tokens(2, 5)
        await idle.until(lambda frame: frame.load.running + frame.load.waiting == 2)


async def test_a_deadline_ends_the_sequence_and_frees_its_pages(worker):
    address, _ = worker
    async with link_to(address) as link:
        await link.send(opens=[opening(1, deadline_ms=50)])
        error = await link.error(1)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await link.until(lambda frame: frame.load.total_pages and frame.load.free_pages == 64)
