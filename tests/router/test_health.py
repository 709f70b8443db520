"""A router's health: as a process it takes requests at once, as a service while a verify worker is ready."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.router.__main__ import run
from betoken.router.settings import RouterSettings
from betoken.router.text.tokenizer import Tokenizer
from betoken.testing.fake_model import FakeModel
from betoken.testing.fake_verify_worker import FakeVerifyWorker, verify_hello
from tests.router.harness import byte_tokenizer_json

SERVICE = "betoken.v1.GenerationService"


async def test_the_service_is_healthy_while_a_verify_worker_is_ready(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    tokenizer = Tokenizer.load(str(tmp_path), None)
    model = FakeModel(vocab_size=tokenizer.vocab_size)
    worker = FakeVerifyWorker(model, verify_hello(model, tokenizer.hash))
    await worker.start()
    ready_file = tmp_path / "ready"
    settings = RouterSettings(verify=(worker.address,), tokenizer=str(tmp_path), port=0, ready_file=ready_file)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(settings))
        while not ready_file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        address = f"127.0.0.1:{json.loads(ready_file.read_text())['port']}"
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            await worker.kill()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            whole = await health.Check(health_pb2.HealthCheckRequest())
            assert whole.status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        running.cancel()
