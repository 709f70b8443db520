"""A verify worker's hello."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from betoken.engine import sampling as engine_limits
from betoken.rpc.validation import sampling as sampling_limits
from betoken.rpc.validation.entries import MAX_EOS_TOKEN_IDS
from betoken.v1.types_pb2 import WorkerHello
from betoken.verify_worker import service
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.engine.tiny import save_tiny


def test_a_verify_worker_names_what_its_bits_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VerifyWorkerSettings(model=save_tiny(tmp_path, "llama"), num_pages=64, compile="off")

    def numerics() -> str:
        hello = WorkerHello()
        service._load(settings, service.VerifyResults(), hello, [])
        return hello.numerics

    ours = numerics()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, "
    assert re.search(re.escape(versions) + "logits [0-9a-f]{12}, llguidance [0-9.]+, code [0-9a-f]{12}$", ours)
    monkeypatch.setattr(service.engine, "__path__", [*service.engine.__path__, str(tmp_path)])
    (tmp_path / "more.py").write_text("x = 1\n")
    theirs = numerics()
    assert theirs != ours and theirs.startswith(ours[:-12])


@pytest.mark.parametrize(("num_pages", "max_context"), [(64, 640), (8, 128)])
def test_a_verify_worker_names_the_context_its_pages_hold(num_pages: int, max_context: int, tmp_path: Path) -> None:
    settings = VerifyWorkerSettings(model=save_tiny(tmp_path, "llama"), num_pages=num_pages, compile="off")
    hello = WorkerHello()
    service._load(settings, service.VerifyResults(), hello, [])
    assert hello.max_context == max_context
    assert hello.kv_bytes and hello.kv_bytes % num_pages == 0
    assert hello.weight_bytes and hello.other_bytes


async def test_a_full_garbage_collection_skips_objects_made_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up all streams."""
    ready_file = tmp_path / "ready.json"
    was_kept: list[bool] = []
    monkeypatch.setattr(service, "freeze_loaded", lambda: was_kept.append(ready_file.exists()))
    model = save_tiny(tmp_path, "llama")
    settings = VerifyWorkerSettings(model=model, num_pages=64, compile="off", ready_file=ready_file)
    running = asyncio.ensure_future(service.run(settings))
    async with asyncio.timeout(60):
        while not ready_file.exists():  # noqa: ASYNC110 (a file sets no event)
            await asyncio.sleep(0.01)
    assert was_kept == [False]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


def test_the_largest_block_leaves_a_row_for_prompts() -> None:
    VerifyWorkerSettings(model="m", max_draft_tokens=6, max_num_batched_tokens=8)
    with pytest.raises(
        ValueError, match="--max-num-batched-tokens = 8: must be at least 9 with --max-draft-tokens = 7"
    ):
        VerifyWorkerSettings(model="m", max_draft_tokens=7, max_num_batched_tokens=8)


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"synthetic": "step_ms=1"}, "--synthetic"),
        ({"batch_invariant": False}, "--no-batch-inv"),
        ({"attached_drafters": ("gemma4_assistant",), "gemma4_assistant": "d"}, "--attached-drafters gemma4_assistant"),
    ],
)
def test_ranks_are_rejected_with_options_that_need_one_process(option: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--tensor-parallel = 2: must be 1 with {name}"):
        VerifyWorkerSettings(model="m", tensor_parallel=2, **option)
    with pytest.raises(ValueError, match=f"--device = 'cpu,cpu': must be one device with {name}"):
        VerifyWorkerSettings(model="m", device="cpu,cpu", **option)


@pytest.mark.parametrize(
    ("device", "size", "devices"),
    [
        ("cpu", 1, ("cpu",)),
        ("cpu", 2, ("cpu", "cpu")),
        ("cuda:1", 2, ("cuda:1", "cuda:2")),
        ("cuda:3, cuda:1", 1, ("cuda:3", "cuda:1")),
        ("cpu,cpu", 2, ("cpu", "cpu")),
    ],
)
def test_a_device_list_has_one_rank_on_each_device(device: str, size: int, devices: tuple[str, ...]) -> None:
    settings = VerifyWorkerSettings(model="m", device=device, tensor_parallel=size)
    assert settings.devices == devices and settings.engine_options()["device"] == devices[0]


@pytest.mark.parametrize(
    ("device", "size", "limit"),
    [
        ("cpu,", 1, "an entry is empty"),
        ("cpu,cpu", 3, "must be 3 devices, or one, with --tensor-parallel = 3"),
        ("cpu,cuda:0", 1, "must be of one kind, not cpu and cuda"),
        ("cuda:0,cuda:0", 1, "must be distinct devices"),
        ("cuda,cuda:1", 1, "must be distinct devices with their numbers"),
        (",".join(["cpu"] * 65), 1, "65 devices, must be at most 64"),
    ],
)
def test_a_device_list_that_ranks_cannot_use_is_rejected(device: str, size: int, limit: str) -> None:
    with pytest.raises(ValueError, match=f"--device = '{device}': {limit}"):
        VerifyWorkerSettings(model="m", device=device, tensor_parallel=size)


def test_the_engine_takes_exactly_what_a_request_may_carry() -> None:
    ours = {name: value for name, value in vars(engine_limits).items() if name.startswith(("MIN_", "MAX_"))}
    sent = {**vars(sampling_limits), "MAX_EOS_TOKEN_IDS": MAX_EOS_TOKEN_IDS}
    assert len(ours) == 10 and ours == {name: sent[name] for name in ours}
