"""Joins the ranks of a model by torch.distributed: gloo for messages, and for activations gloo on CPUs, NCCL on GPUs.
CPU ranks of one machine gather activations in memory that they share.

The store and the place of a rank come from the environment that `torchrun` sets: RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from betoken.engine.errors import RankLostError
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.memory import RankMemory
from betoken.kernels import shared_gather

_UNLIMITED = timedelta(days=365)
"""A rank waits for the next step of an idle worker; a rank that ends is noticed by its closed connection."""
_POLL_S = 0.02
_JOIN_TIMEOUT_S = 300.0
_LOOPBACK = "127.0.0.1"


def place_in_environment() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE.

    Raises:
        ValueError: one is missing or not a number.
    """
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if not all(value.isdecimal() for value in values):
        raise ValueError(f"RANK, WORLD_SIZE: {', '.join(values)} are not two numbers")
    return int(values[0]), int(values[1])


def store_in_environment() -> Store:
    """Connect to the store of rank 0 at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_JOIN_TIMEOUT_S))


def join(
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    memory: RankMemory | None = None,
    explain: Callable[[Exception], str] | None = None,
    lost: Callable[[], RankLostError | None] = lambda: None,
    num_stages: int = 1,
    address: str = _LOOPBACK,
) -> RankGroup:
    """Wait for all ranks and return the group.

    Args:
        memory: of ranks on this machine; None = they share none.
        explain: see `RankGroup`.
        lost: returns the error of a rank that has ended.
        num_stages: pipeline stages, of equal numbers of ranks.
        address: of this machine, at which other ranks reach this one.

    Raises:
        RankLostError: a rank has ended, or did not come in time.
    """
    _wait_for_all(rank, size, store, lost)
    link = _gloo(rank, size, PrefixStore("link", store), address)
    more: dict[str, Any] = {} if explain is None else {"explain": explain}
    tensors = _tensors(rank, size, PrefixStore("tensors", store), device)
    counts = np.zeros(size, np.int64) if memory is None else memory.counts
    if num_stages == 1:
        group = RankGroup(rank, size, link, tensors, counts, **more)
        _share_gathers(group, memory, 0, device, lost)
        return group
    width = size // num_stages
    stage, column = divmod(rank, width)
    own, own_tensors = None, None
    if width > 1:
        place = column, width
        own = _gloo(*place, PrefixStore(f"columns/{stage}", store), address)
        own_tensors = _tensors(*place, PrefixStore(f"columns/{stage}/tensors", store), device)
    columns = RankGroup(column, width, own, own_tensors, counts[stage * width : (stage + 1) * width], **more)
    _share_gathers(columns, memory, stage * width, device, lost)
    return RankGroup(rank, size, link, tensors, counts, columns=columns, **more)


def _share_gathers(
    group: RankGroup,
    memory: RankMemory | None,
    first: int,
    device: torch.device,
    lost: Callable[[], RankLostError | None],
) -> None:
    """Let CPU ranks of one machine gather in shared memory, if all can. `first`: number of the group's first rank."""
    if memory is None or device.type != "cpu" or group.size == 1 or not group.least(shared_gather.is_available()):
        return
    shared = memory.gather(first, group.rank, group.size)

    def gather(source: Tensor, out: Tensor) -> None:
        shared.begin()
        while not shared.try_gather(source, out):
            if (error := lost()) is not None:
                raise RuntimeError(str(error))

    group.gather_with(gather, shared_gather.SLOT_BYTES)


def _wait_for_all(rank: int, size: int, store: Store, lost: Callable[[], RankLostError | None]) -> None:
    """A backend would wait for a rank that has ended before it came."""
    store.set(f"rank/{rank}", "here")
    keys = [f"rank/{other}" for other in range(size)]
    deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
    while not store.check(keys):
        if (error := lost()) is not None:
            raise error
        if time.monotonic() > deadline_s:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            raise RankLostError(f"rank {', '.join(missing)} did not join within {_JOIN_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _gloo(rank: int, size: int, store: Store, address: str) -> Any:
    """The backend at an address of this machine, unless GLOO_SOCKET_IFNAME names an interface."""
    backend: Any = distributed.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    place = {"interface": interface} if interface else {"hostname": address}
    options = backend._Options()
    options._devices, options._timeout = [backend.create_device(**place)], _UNLIMITED
    return backend(store, rank, size, options)


def _tensors(rank: int, size: int, store: Store, device: torch.device) -> Any:
    """The backend for tensors on a GPU; None on a CPU, whose tensors take the messages' backend."""
    return _nccl(rank, size, store) if device.type == "cuda" else None


def _nccl(rank: int, size: int, store: Store) -> Any:
    backend: Any = distributed.ProcessGroupNCCL
    return backend(store, rank, size, backend.Options())
