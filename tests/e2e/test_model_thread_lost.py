"""A worker whose model thread dies or hangs: its links end, health turns NOT_SERVING, the process exits."""

import asyncio
import atexit
import json
import os
import subprocess
import sys
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.common.errors import InternalError
from betoken.draft_worker import commands as draft_commands
from betoken.draft_worker import service as draft_service
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.engine import model_thread
from betoken.v1.draft_pb2 import DraftLinkRequest
from betoken.v1.draft_pb2_grpc import DraftServiceStub
from betoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED, OpenSequence, RouterHello, SamplingParams
from betoken.v1.verify_pb2 import VerifyLinkRequest
from betoken.v1.verify_pb2_grpc import VerifyServiceStub
from betoken.verify_worker import commands as verify_commands
from betoken.verify_worker import service as verify_service
from betoken.verify_worker.settings import VerifyWorkerSettings


class DoomedCore:
    """Takes a sequence in, and raises at the next step, or hangs in it."""

    def __init__(self, release=None):
        """`release`: ends the hanging; None = it raises."""
        self.has_work = False
        self._release = release

    def apply(self, command):
        self.has_work |= isinstance(command, verify_commands.Open | draft_commands.Open)

    def step(self):
        if self._release is None:
            raise LookupError("an internal error")
        self._release.wait()

    def expire(self, now_s):
        return None


def loader(release=None):
    def load(settings, results, hello, *made):
        hello.vocab_size, hello.max_context, hello.max_draft_tokens = 97, 256, 8
        hello.verification_modes.append(VERIFICATION_MODE_COUPLED)
        return DoomedCore(release)

    return load


async def address_in(ready_file):
    async with asyncio.timeout(60):
        while not ready_file.exists():  # noqa: ASYNC110 (a file is not an event)
            await asyncio.sleep(0.01)
    return f"127.0.0.1:{json.loads(ready_file.read_text())['port']}"


WORKERS = pytest.mark.parametrize(
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
OPENING = OpenSequence(sequence_id=1, prompt_ids=[1], max_length=9, sampling=SamplingParams(temperature=0))


async def check_end(running, settings, stub, request_type, why):
    address = await address_in(settings.ready_file)
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = stub(channel).Link()
        await call.write(request_type(hello=RouterHello(protocol_version=1)))
        await call.write(request_type(opens=[OPENING]))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(InternalError, match=why):
            await running


@WORKERS
async def test_a_dead_model_thread_ends_links_health_and_service(
    service, settings_of, stub, request_type, monkeypatch, tmp_path
):
    monkeypatch.setattr(service, "_load", loader())
    settings = settings_of(ready_file=tmp_path / "ready.json", drain_grace_s=600)
    running = asyncio.ensure_future(service.run(settings))
    await check_end(running, settings, stub, request_type, "LookupError: an internal error")


@WORKERS
async def test_a_hanging_model_thread_ends_links_health_and_service(
    service, settings_of, stub, request_type, monkeypatch, tmp_path
):
    release = threading.Event()
    at_exit = []
    monkeypatch.setattr(model_thread, "_STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(service, "_load", loader(release))
    settings = settings_of(ready_file=tmp_path / "ready.json", drain_grace_s=600, watchdog_timeout_s=0.2)
    running = asyncio.ensure_future(service.run(settings))
    try:
        await check_end(running, settings, stub, request_type, "TimeoutError: a step has taken 0.2 s")
        assert len(at_exit) == 1
    finally:
        release.set()


HANGING_DRAFTER = """
import time

class Drafter:
    has_work = True

    def step(self):
        time.sleep(3600)

    open = commit = request = close = check_integrity = None
"""


def test_a_worker_process_with_a_hanging_model_thread_exits(tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING_DRAFTER)
    command = [sys.executable, "-m", "betoken.draft_worker", "--drafters", "hanging:Drafter", "--port", "0"]
    search_path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [*command, "--watchdog-timeout-s", "0.5"],
        env=os.environ | {"PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "the thread draft-model is given up: a step has taken 0.5 s" in ended.stderr
