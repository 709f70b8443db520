"""Options of pipeline stages, and ranks that a launcher has started: what does not fit is named."""

from typing import Any

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.verify_worker.launched import LaunchedRank, launched_rank, num_local_ranks
from betoken.verify_worker.settings import VerifyWorkerSettings

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
FOUR: dict[str, Any] = {"tensor_parallel": 2, "pipeline": 2}


def settings_of(**options: Any) -> VerifyWorkerSettings:
    return VerifyWorkerSettings(model="target", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": 2, "device": "cpu,cpu,cpu"}, "'cpu,cpu,cpu': 3 devices, must be a multiple of --pipeline = 2"),
        (
            FOUR | {"device": "cuda:0,cuda:1"},
            "must be 4 devices, or one, with --tensor-parallel = 2 and --pipeline = 2",
        ),
        ({"pipeline": 33, "tensor_parallel": 2}, "--pipeline = 33: must be at most 32 with --tensor-parallel = 2"),
        ({"pipeline": 2, "synthetic": "step_ms=1"}, "--pipeline = 2: must be 1 with --synthetic"),
        (
            {"pipeline": 2, "attached_drafters": ("gemma4_assistant",), "gemma4_assistant": "assistant"},
            "--pipeline = 2: must be 1 with --attached-drafters gemma4_assistant",
        ),
    ],
    ids=str,
)
def test_options_that_stages_exclude_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(**options)


@pytest.mark.parametrize(
    ("device", "devices"),
    [("cpu", ["cpu"] * 4), ("cuda:2", [f"cuda:{number}" for number in (2, 3, 4, 5)]), ("cpu,cpu,cpu,cpu", ["cpu"] * 4)],
)
def test_every_rank_of_every_stage_has_a_device(device: str, devices: list[str]) -> None:
    settings = settings_of(**FOUR, device=device)
    assert list(settings.devices) == devices and settings.tensor_parallel_degree == 2


def test_two_stages_take_a_list_of_two_gpus() -> None:
    settings = settings_of(pipeline=2, device="cuda:1,cuda:0")
    assert settings.devices == ("cuda:1", "cuda:0") and settings.tensor_parallel_degree == 1


def test_a_rank_that_torchrun_started_is_found_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_rank(settings_of(**FOUR)) is None
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert launched_rank(settings_of(**FOUR)) == LaunchedRank(1, 4, "cpu")
    assert num_local_ranks(settings_of(**FOUR)) == 4
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launched_rank(settings_of(tensor_parallel=4, device="cuda")) == LaunchedRank(1, 4, "cuda:1")
    assert num_local_ranks(settings_of(**FOUR)) == 2
    assert launched_rank(settings_of(pipeline=4, device="cuda")) == LaunchedRank(1, 4, "cuda:1")


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"pipeline": 2}, {}, "WORLD_SIZE = 4: must be 2, --tensor-parallel = 1 times --pipeline = 2"),
        ({"device": "cpu,cpu,cpu,cpu"}, {}, "--device = cpu,cpu,cpu,cpu: must be one device with RANK = 1"),
        ({"device": "cuda:0", "tensor_parallel": 4}, {}, "--device = cuda:0: must be cpu, or cuda"),
        ({"device": "cuda", "tensor_parallel": 4}, {"LOCAL_RANK": "x"}, "LOCAL_RANK = x: must be a number from 0 to 3"),
        (FOUR, {"RANK": "4"}, "RANK = 4: must be a number from 0 to 3"),
        (FOUR, {"MASTER_PORT": "0"}, "MASTER_PORT = 0: must be a number from 1 to 65535"),
    ],
    ids=str,
)
def test_an_environment_of_a_launcher_that_does_not_fit_is_rejected(
    options: dict[str, Any], environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (PLACE | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=message):
        launched_rank(settings_of(**options))
