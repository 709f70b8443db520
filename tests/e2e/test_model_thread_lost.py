"""A worker whose model thread dies: its links end, health turns, the process is told to exit."""

import asyncio
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken.draft_worker import service as draft_service
from foretoken.draft_worker.settings import DraftWorkerSettings
from foretoken.rpc.errors import InternalError
from foretoken.v1.draft_pb2 import DraftLinkRequest
from foretoken.v1.draft_pb2_grpc import DraftServiceStub
from foretoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED, OpenSequence, RouterHello, SamplingParams
from foretoken.v1.verify_pb2 import VerifyLinkRequest
from foretoken.v1.verify_pb2_grpc import VerifyServiceStub
from foretoken.verify_worker import service as verify_service
from foretoken.verify_worker.settings import VerifyWorkerSettings


class DoomedCore:
    """Takes a sequence in, and raises at the next step."""

    def __init__(self):
        self.has_work = False

    def open(self, sequence, drafter_name=""):
        self.has_work = True

    def step(self):
        raise LookupError("a bug of ours")

    def expire(self, now_s):
        return None

    def report_load(self):
        pass

    def close_link(self, link_id):
        pass


def load_doomed(settings, results, hello):
    hello.vocab_size, hello.max_context, hello.max_draft_tokens = 97, 256, 8
    hello.verification_modes.append(VERIFICATION_MODE_COUPLED)
    return DoomedCore()


async def address_in(ready_file):
    async with asyncio.timeout(60):
        while not ready_file.exists():  # noqa: ASYNC110 (a file is no event)
            await asyncio.sleep(0.01)
    return f"127.0.0.1:{json.loads(ready_file.read_text())['port']}"


@pytest.mark.parametrize(
    ("service", "settings_of", "stub", "request_type"),
    [
        (
            verify_service,
            lambda **more: VerifyWorkerSettings(model="any", **more),
            VerifyServiceStub,
            VerifyLinkRequest,
        ),
        (
            draft_service,
            lambda **more: DraftWorkerSettings(drafters=["ngram"], **more),
            DraftServiceStub,
            DraftLinkRequest,
        ),
    ],
    ids=["verify", "draft"],
)
async def test_links_health_and_service_end(service, settings_of, stub, request_type, monkeypatch, tmp_path):
    monkeypatch.setattr(service, "_load", load_doomed)
    settings = settings_of(ready_file=tmp_path / "ready.json", drain_grace_s=600)
    running = asyncio.ensure_future(service.run(settings))
    address = await address_in(settings.ready_file)
    opening = OpenSequence(sequence_id=1, prompt_ids=[1], max_length=9, sampling=SamplingParams(temperature=0))
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = stub(channel).Link()
        await call.write(request_type(hello=RouterHello(protocol_version=1)))
        await call.write(request_type(opens=[opening]))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(InternalError, match="LookupError: a bug of ours"):
            await running
