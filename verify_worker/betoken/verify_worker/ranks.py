"""The ranks of a verify worker that shares its model among several processes (`--tensor-parallel`, `--pipeline`).

Rank 0 is the worker itself: it serves, schedules and samples. The others run the same forwards over their layers and
columns. `python -m betoken.verify_worker.ranks` is one of them, started by rank 0. A launcher such as `torchrun` starts
all of them as verify workers.
"""

import logging
import os
import pickle
import signal
import sys
from dataclasses import replace

import torch

from betoken.common.logs import configure_logging
from betoken.engine.bring_up.follow import follow
from betoken.engine.config import EngineConfig
from betoken.engine.errors import RankLostError
from betoken.engine.model_thread import ModelThread
from betoken.engine.ranks.joining import join, place_in_environment, store_in_environment
from betoken.engine.ranks.launched import LaunchedStore
from betoken.engine.ranks.parent import end_with_parent
from betoken.engine.ranks.processes import RankProcesses, counts_in_environment
from betoken.engine.weights.checkpoint import Progress
from betoken.rpc.early_end import at_end
from betoken.verify_worker.built_in import with_built_in
from betoken.verify_worker.commands import VerifyCommand
from betoken.verify_worker.engine_config import engine_config
from betoken.verify_worker.launched import LaunchedRank, launched_rank
from betoken.verify_worker.settings import VerifyWorkerSettings

_LOG = logging.getLogger(__name__)
_COMMAND = (sys.executable, "-m", "betoken.verify_worker.ranks")


def start_ranks(
    settings: VerifyWorkerSettings,
    config: EngineConfig,
    thread: ModelThread[VerifyCommand] | None,
    progress: Progress,
) -> EngineConfig:
    """Start the other ranks with the worker's settings unless a launcher has, join them, and return rank 0's config.

    A worker of one rank has no others. A started rank that ends fails the thread.

    Raises:
        RankLostError: one has ended, or did not join in time.
        InvalidArgumentError: the launcher's environment does not fit the settings.
    """
    launched, size = launched_rank(settings), len(settings.devices)
    if size == 1:
        return config
    progress("starting ranks", 0.0)
    if launched is not None:
        store = LaunchedStore(launched.rank)
        at_end(store.announce_end)
        return _joined(settings, config, launched, store)
    given = pickle.dumps((settings.model_dump(), os.getpid()))
    processes = RankProcesses(size, _COMMAND, given, (lambda error: None) if thread is None else thread.fail)
    at_end(processes.close)
    if thread is not None:
        thread.explain_hang = processes.slowest
    device = torch.device(config.device)
    group = join(
        0, size, processes.store, device, processes.counts, processes.explain, processes.lost, settings.pipeline
    )
    return replace(config, ranks=group)


def follow_launched(settings: VerifyWorkerSettings, launched: LaunchedRank) -> None:
    """Follow rank 0, on any machine, until it ends; then end this process.

    Signals to stop are left to rank 0, which drains first.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logging(settings.log_level, settings.log_format)
    store: LaunchedStore | None = None
    try:
        store = LaunchedStore(launched.rank)
        settings = with_built_in(settings, lambda stage, fraction: None)
        follow(_joined(settings, engine_config(settings), launched, store))
    except Exception as error:
        if isinstance(error, RankLostError) and store is not None and store.has_ended():
            os._exit(0)  # a backend whose peers are gone may block the rest of the exit
        cause = f"{type(error).__name__}: {error}"
        _LOG.critical("rank %d, pid %d, cannot go on: %s", launched.rank, os.getpid(), cause)
        if store is not None:
            store.report(f"rank {launched.rank}, pid {os.getpid()}, ended: {cause}")
        os._exit(1)


def _joined(
    settings: VerifyWorkerSettings, config: EngineConfig, launched: LaunchedRank, store: LaunchedStore
) -> EngineConfig:
    """The config of a rank that a launcher has started, once all ranks are there."""
    group = join(
        launched.rank,
        launched.size,
        store.store,
        torch.device(launched.device),
        explain=store.explain,
        lost=store.lost,
        num_stages=settings.pipeline,
        address=store.address,
    )
    return replace(config, device=launched.device, ranks=group)


def main() -> None:
    """Follow rank 0 until it ends; the last words on standard output are the cause of another end."""
    values, parent = pickle.load(sys.stdin.buffer)
    end_with_parent()
    if os.getppid() != parent:
        return
    settings = VerifyWorkerSettings.model_construct(**values)
    configure_logging("error" if settings.log_level == "error" else "warning", settings.log_format)
    try:
        rank, size = place_in_environment()
        config = replace(engine_config(settings), device=settings.devices[rank])
        store, counts = store_in_environment(), counts_in_environment(size)
        group = join(rank, size, store, torch.device(config.device), counts, num_stages=settings.pipeline)
        follow(replace(config, ranks=group))
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(1)  # a backend whose peers are gone may block the rest of the exit


if __name__ == "__main__":
    main()
