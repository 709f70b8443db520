"""The place of a process that a launcher has started as one rank of a worker, such as `torchrun`.

Launchers set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. It reads the environment and imports no torch.
"""

import os
from typing import NamedTuple

from betoken.common.errors import InvalidArgumentError
from betoken.verify_worker.settings import VerifyWorkerSettings

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedRank(NamedTuple):
    """One process of a worker that a launcher has started."""

    rank: int
    size: int
    device: str


def launched_rank(settings: VerifyWorkerSettings) -> LaunchedRank | None:
    """Return the rank of this process, None if it has been started alone.

    Raises:
        InvalidArgumentError: the environment does not fit the settings.
    """
    if not _is_launched():
        return None
    if "," in settings.device:
        raise InvalidArgumentError("--device", settings.device, f"must be one device with RANK = {os.environ['RANK']}")
    size = len(settings.devices)
    if (given := os.environ["WORLD_SIZE"]) != str(size):
        parts = f"--tensor-parallel = {settings.tensor_parallel} times --pipeline = {settings.pipeline}"
        raise InvalidArgumentError("WORLD_SIZE", given, f"must be {size}, {parts}")
    rank = _number("RANK", 0, size - 1)
    _number("MASTER_PORT", 1, 65535)
    device = settings.device
    if device != "cpu":
        if device != "cuda":
            raise InvalidArgumentError("--device", device, "must be cpu, or cuda for the GPU that LOCAL_RANK names")
        device = f"cuda:{_number('LOCAL_RANK', 0, size - 1)}"
    return LaunchedRank(rank, size, device)


def num_local_ranks(settings: VerifyWorkerSettings) -> int:
    """Return the number of ranks on this machine."""
    num_ranks = len(settings.devices)
    is_known = _is_launched() and "LOCAL_WORLD_SIZE" in os.environ
    return _number("LOCAL_WORLD_SIZE", 1, num_ranks) if is_known else num_ranks


def _is_launched() -> bool:
    return all(name in os.environ for name in _NAMES)


def _number(name: str, least: int, most: int) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise InvalidArgumentError(name, text, f"must be a number from {least} to {most}")
    return int(text)
