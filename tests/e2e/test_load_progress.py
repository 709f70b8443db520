"""A worker that rounds weights at load time reports its progress; a router serves once it has finished."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.client import ModelInfo
from betoken.common.errors import LoadingError, from_rpc_error
from betoken.router.__main__ import run as run_router
from betoken.router.settings import RouterSettings
from betoken.rpc.progress import LoadProgress
from betoken.v1 import generation_pb2_grpc
from betoken.v1.generation_pb2 import GenerateRequest, GetModelInfoRequest
from betoken.verify_worker import service as verify_service
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.e2e.in_process import ENGINE, save_pair

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ROUNDING = "rounding weights to int8"


class HeldProgress(LoadProgress):
    """Stops the load once, between two weights that are rounded; keeps what its file said each time."""

    def __init__(self, ready_file: Path | None) -> None:
        super().__init__(ready_file)
        self.told: list[tuple[str, float]] = []
        self.is_held, self.is_released = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: dict[int, object]) -> HeldProgress:
        return self  # transformers copies configs with what they hold

    def __call__(self, stage: str, fraction: float) -> None:
        super().__call__(stage, fraction)
        assert self._path is not None
        told = json.loads(self._path.read_text())
        self.told.append((told["stage"], told["fraction"]))
        if [stage for stage, _ in self.told].count(ROUNDING) == 3:
            self.is_held.set()
            self.is_released.wait()


@asynccontextmanager
async def started(progress: HeldProgress, running: Any) -> AsyncIterator[None]:
    """A service that runs meanwhile."""
    task = asyncio.ensure_future(running)
    try:
        yield
    finally:
        progress.is_released.set()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def described(stub: Any) -> ModelInfo:
    return ModelInfo.from_proto(await stub.GetModelInfo(GetModelInfoRequest(at_once=True)))


async def test_a_load_that_rounds_reports_its_progress_and_is_not_served_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save_pair(tmp_path)
    progress = HeldProgress(tmp_path / "ready")
    monkeypatch.setattr(verify_service, "LoadProgress", lambda _: progress)
    model, worker, router = tmp_path / "target", f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/router.sock"
    settings = VerifyWorkerSettings(
        model=str(model), quantize="int8", host=worker, ready_file=tmp_path / "ready", **ENGINE
    )
    of_router = RouterSettings(verify=(worker,), tokenizer=str(model), host=router)
    async with (
        asyncio.timeout(60),
        started(progress, verify_service.run(settings)),
        started(progress, run_router(of_router)),
        grpc.aio.insecure_channel(router) as of_service,
        grpc.aio.insecure_channel(worker) as of_worker,
    ):
        watch = health_pb2_grpc.HealthStub(of_service).Watch(
            health_pb2.HealthCheckRequest(service="betoken.v1.GenerationService"), wait_for_ready=True
        )
        assert (await watch.read()).status == NOT_SERVING
        assert await asyncio.to_thread(progress.is_held.wait, 60)
        stage, fraction = progress.told[-1]
        assert stage == ROUNDING and 0.0 < fraction < 1.0
        assert f"loading: {ROUNDING}" in caplog.messages
        health = health_pb2_grpc.HealthStub(of_worker)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        stub = generation_pb2_grpc.GenerationServiceStub(of_service)
        while (await described(stub)).verify_workers[0].detail != ROUNDING:  # noqa: ASYNC110 (a service sets no event)
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(GenerateRequest(prompt="a")).read()
        error = from_rpc_error(refused.value)
        assert isinstance(error, LoadingError) and error.stage == ROUNDING and 0.0 < error.fraction < 1.0
        info = await described(stub)
        assert info.verify_workers[0].state == "loading" and str(info.loading) == str(error)
        progress.is_released.set()
        assert (await watch.read()).status == SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status == SERVING
        watch.cancel()
    fractions = [fraction for _, fraction in progress.told]
    assert fractions == sorted(fractions)
    assert len({fraction for stage, fraction in progress.told if stage == ROUNDING}) > 3
