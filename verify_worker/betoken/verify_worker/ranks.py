"""The ranks of a verify worker that shares its model among several processes (`--tensor-parallel`, `--pipeline`).

Rank 0 is the worker itself: it serves, schedules and samples. The others run the same forwards over their layers and
columns. Rank 0 starts them, unless a launcher such as `torchrun` starts all of them as verify workers.
"""

import logging
import os
import signal
from dataclasses import replace

import torch

from betoken.common.logs import configure_logging
from betoken.engine.bring_up.follow import follow
from betoken.engine.bring_up.ranks import start_ranks as start_processes
from betoken.engine.config import EngineConfig
from betoken.engine.errors import RankLostError
from betoken.engine.model_thread import ModelThread
from betoken.engine.ranks.joining import join
from betoken.engine.ranks.launched import LaunchedStore
from betoken.engine.weights.checkpoint import Progress
from betoken.rpc.early_end import at_end
from betoken.verify_worker.built_in import with_built_in
from betoken.verify_worker.commands import VerifyCommand
from betoken.verify_worker.engine_config import engine_config
from betoken.verify_worker.launched import LaunchedRank, launched_rank
from betoken.verify_worker.settings import VerifyWorkerSettings

_LOG = logging.getLogger(__name__)


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
    return start_processes(config, settings.devices, settings.rank_logging, thread, at_end, settings.pipeline)


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
