"""The draft worker over a real gRPC link: drafts with provenance, refusals by name, pages freed."""

import asyncio
import json
import tracemalloc
from contextlib import suppress
from unittest.mock import Mock

import grpc
import numpy
import pytest

from betoken.common import names
from betoken.common.errors import InvalidArgumentError, from_link_error, to_link_error
from betoken.draft_worker import service
from betoken.draft_worker.core import DraftCore
from betoken.draft_worker.handler import DraftLinkHandler, DraftResults
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.host.hosted import Answer, HostedSequence, Request
from betoken.drafters.lookahead.settings import LookaheadSettings
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.drafters.settings import check_names
from betoken.engine.model_thread import ModelThread
from betoken.engine.sampling import SamplingParams as EngineSampling
from betoken.rpc.link import LinkServicer
from betoken.rpc.link.worker_entries import WorkerLoad
from betoken.rpc.validation import CONTEXT_FIELDS, validate_distribution
from betoken.v1 import draft_pb2_grpc
from betoken.v1.draft_pb2 import Commit, DraftLinkRequest, DraftLinkResponse, DraftRequest
from betoken.v1.types_pb2 import (
    CloseSequence,
    DrafterChoice,
    OpenSequence,
    RouterHello,
    SamplingParams,
    WorkerHello,
)

PROMPT = [1, 2, 3, 4, 1, 2]
MAX_CONTEXT = 300


@pytest.fixture
async def link(fake_runner_class):
    """A connected link and the fake draft model behind it."""
    runner = fake_runner_class()
    results = DraftResults()
    drafters = {"model": ModelDrafter(runner, 32, 8), "ngram": NgramDrafter()}
    thread = ModelThread(lambda: DraftCore(drafters, [runner.page_table], results, 8), "fake")
    await asyncio.wrap_future(thread.start())
    handler = DraftLinkHandler(thread.submit, results, 8, "w2", max_context=MAX_CONTEXT)
    servicer = LinkServicer(WorkerHello, handler, DraftLinkResponse)
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Link()
        await call.write(DraftLinkRequest(hello=RouterHello(protocol_version=1)))
        yield call, runner
        call.cancel()
    await server.stop(0)
    thread.stop(5)


def opening(sequence_id, drafter, **settings):
    return OpenSequence(
        sequence_id=sequence_id,
        prompt_ids=PROMPT,
        max_length=100,
        sampling=SamplingParams(temperature=0),
        drafter=DrafterChoice(name=drafter, settings=settings),
    )


async def test_a_sequences_span_names_its_worker(link, exported):
    call, _ = link
    await call.write(DraftLinkRequest(opens=[opening(1, "ngram")], closes=[CloseSequence(sequence_id=1)]))
    async with asyncio.timeout(20):
        while not (spans := exported.get_finished_spans()):  # noqa: ASYNC110 (another thread ends it)
            await asyncio.sleep(0.005)
    attributes = spans[0].attributes
    assert (attributes[names.WORKER_ROLE], attributes[names.WORKER_ID]) == ("draft", "w2")


def draft_request(sequence_id, ids=PROMPT, num_tokens=3):
    return DraftRequest(sequence_id=sequence_id, base_length=len(ids), next_id=ids[-1], num_tokens=num_tokens)


async def read_until(call, found):
    async with asyncio.timeout(20):
        while True:
            frame = await call.read()
            if found(frame):
                return frame


async def test_drafts_carry_their_source_and_follow_commits(link):
    call, runner = link
    requests = [draft_request(n) for n in (1, 2)]
    await call.write(DraftLinkRequest(opens=[opening(1, "model"), opening(2, "ngram")], requests=requests))
    blocks = {}
    while len(blocks) < 2:
        frame = await read_until(call, lambda frame: frame.blocks)
        blocks |= {block.sequence_id: block for block in frame.blocks}
    assert list(blocks[1].ids) == runner.complete(PROMPT, 3)
    assert list(blocks[1].sources) == ["model"] * 3
    assert list(blocks[2].ids) == [3, 4, 1]
    assert list(blocks[2].sources) == ["ngram"]
    assert blocks[1].base_length == len(PROMPT)

    commits = [Commit(sequence_id=1, base_length=6, ids=[9])]
    await call.write(DraftLinkRequest(requests=[draft_request(1, [*PROMPT, 9])], commits=commits))
    frame = await read_until(call, lambda frame: frame.blocks)
    assert (frame.blocks[0].base_length, frame.blocks[0].next_id) == (7, 9)
    assert list(frame.blocks[0].ids) == runner.complete([*PROMPT, 9], 3)


async def test_a_sequence_longer_than_the_worker_takes_is_refused_by_name_and_others_go_on(link):
    call, _ = link
    long, growing, whole = opening(1, "ngram"), opening(2, "ngram"), opening(3, "ngram")
    long.prompt_ids.extend([1] * (MAX_CONTEXT - len(PROMPT)))
    long.committed_ids.append(1)
    whole.prompt_ids.extend([1] * (MAX_CONTEXT - len(PROMPT)))
    for entry in (long, growing, whole):
        entry.max_length = 100_000  # how long it may become says the target
    commits = [Commit(sequence_id=2, base_length=len(PROMPT), ids=[1] * (MAX_CONTEXT + 1 - len(PROMPT)))]
    requests = [draft_request(3, [1] * MAX_CONTEXT)]
    await call.write(DraftLinkRequest(opens=[long, growing, whole], commits=commits, requests=requests))
    errors, blocks = {}, []
    async with asyncio.timeout(20):
        while len(errors) < 2 or not blocks:
            frame = await call.read()
            errors |= {entry.sequence_id: from_link_error(entry) for entry in frame.errors}
            blocks.extend(frame.blocks)
    for sequence_id, field in ((1, "open.prompt_ids"), (2, "commit.ids")):
        error = errors[sequence_id]
        assert isinstance(error, InvalidArgumentError) and error.field == field in CONTEXT_FIELDS
        assert (error.value, str(MAX_CONTEXT) in error.limit) == (f"{MAX_CONTEXT + 1} tokens", True)
    assert blocks[0].sequence_id == 3


async def test_a_long_open_is_refused_without_being_kept(link):
    call, _ = link
    huge = opening(1, "ngram")
    huge.prompt_ids.extend([1] * 400_000)
    huge.max_length = 1 << 30
    peak_bytes = 0
    tracemalloc.start()
    try:
        for sequence_id in range(1, 21):
            huge.sequence_id = sequence_id
            await call.write(DraftLinkRequest(opens=[huge]))
            await read_until(call, lambda frame: frame.errors)
            peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


async def test_only_rejection_above_temperature_0_gets_distributions(link):
    call, _ = link
    opens = [opening(1, "model"), opening(2, "model"), opening(3, "model")]
    for entry, mode, temperature in zip(opens, (2, 2, 3), (1.0, 0.0, 1.0), strict=True):
        entry.mode = mode
        entry.sampling.CopyFrom(SamplingParams(temperature=temperature, seed=5))
    requests = [draft_request(n) for n in (1, 2, 3)]
    await call.write(DraftLinkRequest(opens=opens, requests=requests))
    blocks = {}
    while len(blocks) < 3:
        frame = await read_until(call, lambda frame: frame.blocks)
        blocks |= {block.sequence_id: block for block in frame.blocks}
    assert [len(blocks[n].draft_probs) for n in (1, 2, 3)] == [3, 0, 0]
    for token_id, sparse in zip(blocks[1].ids, blocks[1].draft_probs, strict=True):
        validate_distribution("draft_probs", sparse, token_id, vocab_size=97)


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("drafter.name", {"opens": [opening(7, "nonsense")]}),
        ("drafter.settings.max_ngram", {"opens": [opening(7, "ngram", max_ngram="x")]}),
        (
            "request.num_tokens",
            {"opens": [opening(7, "ngram")], "requests": [draft_request(7, num_tokens=9)]},
        ),
    ],
)
async def test_link_errors_name_the_field(link, field, entry):
    call, _ = link
    await call.write(DraftLinkRequest(**entry))
    frame = await read_until(call, lambda frame: frame.errors)
    assert frame.errors[0].sequence_id == 7
    assert from_link_error(frame.errors[0]).field == field


@pytest.mark.parametrize(
    ("refuse", "value"),
    [
        (lambda: check_names({"depth": "2"}, known=()), "depth"),
        (lambda: LookaheadSettings().override_within({"window": "10"}, max_rows=16), "10"),
    ],
)
def test_a_refusal_of_settings_keeps_its_value_and_limit_on_a_link(refuse, value):
    with pytest.raises(InvalidArgumentError, match=value) as caught:
        refuse()
    told = from_link_error(to_link_error(caught.value, 7))
    assert (told.field, told.value, told.limit) == (caught.value.field, value, caught.value.limit)


def test_an_empty_draft_may_come_in_arrays():
    class Recorder:
        id, frames = 1, []

        def send(self, frame):
            self.frames.append(frame)

    results, nothing = DraftResults(), numpy.array([], dtype=int)
    results.add(Recorder())
    sequence = DraftSequence((1, 7), EngineSampling(), PROMPT, [], 100)
    drafted = Drafted(sequence, [], parents=nothing, sources=nothing)
    drafted.check()
    hosted = HostedSequence(sequence, "model", Mock())
    results.drafted([Answer(hosted, Request(3, 3), drafted, nothing, 0)], lambda: WorkerLoad(1, 0, 0, 0))
    assert [list(block.ids) for block in Recorder.frames[0].blocks] == [[]]


async def test_closing_frees_the_pages(link):
    call, _ = link
    requests = [draft_request(1)]
    await call.write(DraftLinkRequest(opens=[opening(1, "model")], requests=requests))
    frame = await read_until(call, lambda frame: frame.blocks)
    assert frame.load.free_pages < frame.load.total_pages
    await call.write(DraftLinkRequest(closes=[CloseSequence(sequence_id=1)]))
    frame = await read_until(call, lambda frame: frame.HasField("load"))
    assert frame.load.free_pages == frame.load.total_pages == 64


async def test_a_frame_of_countless_entries_ends_its_link(link):
    call, _ = link
    await call.write(DraftLinkRequest(closes=[CloseSequence()] * 100_000))
    with suppress(grpc.aio.AioRpcError):
        await read_until(call, lambda frame: frame is grpc.aio.EOF)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "frame = 100000 entries: must be at most 65536 of a kind"


async def test_the_bound_on_links_is_the_setting_s(tmp_path):
    settings = DraftWorkerSettings(drafters=["ngram"], max_links=1, ready_file=tmp_path / "ready.json")
    running = asyncio.ensure_future(service.run(settings))
    async with asyncio.timeout(20):
        while not settings.ready_file.exists():  # noqa: ASYNC110 (a file sets no event)
            await asyncio.sleep(0.01)
        address = f"127.0.0.1:{json.loads(settings.ready_file.read_text())['port']}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            first = stub.Link()
            await first.write(DraftLinkRequest(hello=RouterHello(protocol_version=1)))
            assert (await first.read()).hello.drafters == ["ngram"]
            assert await stub.Link().code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # before it has written anything
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_full_garbage_collection_skips_objects_made_at_load(tmp_path, monkeypatch):
    """It would hold up the drafts of all streams."""
    was_kept = []
    monkeypatch.setattr(service, "freeze_loaded", lambda: was_kept.append(settings.ready_file.exists()))
    settings = DraftWorkerSettings(drafters=["ngram"], ready_file=tmp_path / "ready.json")
    running = asyncio.ensure_future(service.run(settings))
    async with asyncio.timeout(20):
        while not settings.ready_file.exists():  # noqa: ASYNC110 (a file sets no event)
            await asyncio.sleep(0.01)
    assert was_kept == [False]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
