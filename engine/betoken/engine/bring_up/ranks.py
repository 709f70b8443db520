"""The processes of a model's ranks after rank 0: each is started with rank 0's options and follows it.

Rank 0 is the process that serves the model. `python -m betoken.engine.bring_up.ranks` is another rank.
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np
import torch

from betoken.engine.bring_up.follow import follow
from betoken.engine.config import EngineConfig
from betoken.engine.errors import RankLostError
from betoken.engine.model_thread import ModelThread
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.joining import join, place_in_environment, store_in_environment
from betoken.engine.ranks.memory import RankMemory
from betoken.engine.ranks.parent import end_with_parent
from betoken.engine.ranks.processes import RankProcesses

_COMMAND = (sys.executable, "-m", "betoken.engine.bring_up.ranks")


def start_ranks(
    config: EngineConfig,
    devices: Sequence[str],
    prepare: Callable[[], None],
    thread: ModelThread[Any] | None,
    at_end: Callable[[Callable[[], None]], None],
    num_stages: int = 1,
) -> EngineConfig:
    """Start a process for each device after the first, join them, and return rank 0's options. Ranks divide the
    machine's cores if the options set no number of threads.

    Args:
        prepare: called first by each process; it is pickled.
        thread: fails when a rank has ended, or the ranks are at different exchanges.
        at_end: registers what to call when this process ends.
        num_stages: pipeline stages.

    Raises:
        RankLostError: one has ended, or did not join in time.
    """
    if config.num_threads is None:
        config = replace(config, num_threads=max(1, torch.get_num_threads() // len(devices)))
    wanted, size = config.feature_layers, len(devices)
    own = replace(config, feature_layers=None)
    given = pickle.dumps((own, wanted is not None, devices, num_stages, prepare, os.getpid()))
    on_lost: Callable[[RankLostError], None] = (lambda error: None) if thread is None else thread.fail
    processes = RankProcesses(size, _COMMAND, given, on_lost)
    at_end(processes.close)
    if thread is not None:
        explain_hang = thread.explain_hang
        thread.explain_hang = lambda: explain_hang() + processes.slowest()
    device = torch.device(config.device)
    group = join(0, size, processes.store, device, processes.memory, processes.explain, processes.lost, num_stages)
    group.on_lost = on_lost
    finalize(group, processes.close)  # of a model that is loaded again
    return replace(config, ranks=group, feature_layers=wanted and partial(_send_layers, group, wanted))


def _send_layers(group: RankGroup, wanted: Callable[[int], Sequence[int]], num_layers: int) -> Sequence[int]:
    """Layers whose hidden states forwards yield, by rank 0's options."""
    layers = wanted(num_layers)
    group.send(np.array(layers, np.int32))
    return layers


def _receive_layers(group: RankGroup, num_layers: int) -> Sequence[int]:
    layers: list[int] = group.receive().tolist()
    return layers


def main() -> None:
    """Follow rank 0 until it ends; the last words on standard output are the cause of another end."""
    config, has_features, devices, num_stages, prepare, parent = pickle.load(sys.stdin.buffer)
    end_with_parent()
    if os.getppid() != parent:
        return
    prepare()
    try:
        rank, size = place_in_environment()
        own = replace(config, device=devices[rank])
        store, memory = store_in_environment(), RankMemory.in_environment(size)
        group = join(rank, size, store, torch.device(own.device), memory, num_stages=num_stages)
        feature_layers = partial(_receive_layers, group) if has_features else None
        follow(replace(own, ranks=group, feature_layers=feature_layers))
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(1)  # a backend whose peers are gone may block the rest of the exit


if __name__ == "__main__":
    main()
