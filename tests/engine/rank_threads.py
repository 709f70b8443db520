"""Ranks of a model as threads of this process, over gloo: quicker to start than processes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import distributed

from betoken.engine.bring_up.follow import follow_model
from betoken.engine.bring_up.load import runner_of
from betoken.engine.config import EngineConfig
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks import joining
from betoken.engine.ranks.commands import Command, pack
from betoken.engine.ranks.loading import load_part
from betoken.engine.runner import ModelRunner

TIMEOUT_S = 120.0


@contextmanager
def joined(size: int) -> Iterator[list[RankGroup]]:
    """The groups of `size` ranks; an exchange without its counterpart fails in the end."""
    store, groups = distributed.HashStore(), {}

    def join_rank(rank: int) -> None:
        groups[rank] = joining.join(rank, size, store, torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_UNLIMITED", timedelta(seconds=TIMEOUT_S))
        threads = [threading.Thread(target=join_rank, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    yield [groups[rank] for rank in range(size)]


@contextmanager
def shared_runner(config: EngineConfig, size: int) -> Iterator[ModelRunner]:
    """Rank 0's runner of a model that `size` ranks share."""
    faults: list[BaseException] = []

    def follow_rank(group: RankGroup, loaded: tuple) -> None:
        try:
            follow_model(replace(config, ranks=group), *loaded)
        except BaseException as error:
            faults.append(error)

    with joined(size) as groups:
        models = [load_part(replace(config, ranks=group), lambda stage, fraction: None) for group in groups]
        threads = [
            threading.Thread(target=follow_rank, args=pair, daemon=True)
            for pair in zip(groups[1:], models[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        yield runner_of(replace(config, ranks=groups[0]), *models[0])
        groups[0].send(pack(Command.RELOAD))
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not faults and not any(thread.is_alive() for thread in threads)
