"""The ranks of a verify worker that shares its model among several processes (`--tensor-parallel`, `--device`).

Rank 0 is the worker itself: it serves, schedules and samples. The others run the same forwards over their columns.
`python -m betoken.verify_worker.ranks` is one of them, started by rank 0.
"""

import os
import pickle
import sys
from dataclasses import replace

import torch

from betoken.common.logs import configure_logging
from betoken.engine.bring_up.follow import follow
from betoken.engine.config import EngineConfig
from betoken.engine.model_thread import ModelThread
from betoken.engine.ranks.joining import join, place_in_environment, store_in_environment
from betoken.engine.ranks.parent import end_with_parent
from betoken.engine.ranks.processes import RankProcesses, counts_in_environment
from betoken.rpc.early_end import at_end
from betoken.verify_worker.commands import VerifyCommand
from betoken.verify_worker.engine_config import engine_config
from betoken.verify_worker.settings import VerifyWorkerSettings

_COMMAND = (sys.executable, "-m", "betoken.verify_worker.ranks")


def start_ranks(
    settings: VerifyWorkerSettings, config: EngineConfig, thread: ModelThread[VerifyCommand] | None
) -> EngineConfig:
    """Start the other ranks with the worker's settings, join them, and return rank 0's config.

    A rank that ends fails the thread.

    Raises:
        RankLostError: one has ended, or did not join in time.
    """
    size = len(settings.devices)
    given = pickle.dumps((settings.model_dump(), os.getpid()))
    processes = RankProcesses(size, _COMMAND, given, (lambda error: None) if thread is None else thread.fail)
    at_end(processes.close)
    if thread is not None:
        thread.explain_hang = processes.slowest
    device = torch.device(config.device)
    group = join(0, size, processes.store, device, processes.counts, processes.explain, processes.lost)
    return replace(config, ranks=group)


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
        group = join(rank, size, store_in_environment(), torch.device(config.device), counts_in_environment(size))
        follow(replace(config, ranks=group))
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(1)  # a backend whose peers are gone may block the rest of the exit


if __name__ == "__main__":
    main()
