"""Ranks of a model as threads of this process, over gloo: quicker to start than processes; and the bits to compare."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from betoken.engine.batch import Segment
from betoken.engine.bring_up.follow import follow_model
from betoken.engine.bring_up.load import runner_of
from betoken.engine.bring_up.self_check import forward_in_chunks, forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.cpu import forward
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks import joining
from betoken.engine.ranks.commands import Command, pack
from betoken.engine.ranks.loading import load_part
from betoken.engine.ranks.memory import RankMemory
from betoken.engine.runner import ModelRunner
from betoken.engine.tree import KeptPath
from tests.engine import quantized_files as files

TIMEOUT_S = 120.0
QUANTIZED: dict[str, Any] = {
    "gptq": (files.gptq_config(4, 32), files.store_gptq(4, 32, less=1)),
    "gptq, ordered": (files.gptq_config(4, 32, desc_act=True), files.store_gptq(4, 32, less=1, is_ordered=True)),
    "fp8": (files.fp8_config((64, 64)), files.store_fp8((64, 64))),
}
SEQUENCES = [list(range(1, 24)), [7], list(range(50, 59))]


@contextmanager
def joined(size: int, num_stages: int = 1, device: str = "cpu", *, is_shared: bool = True) -> Iterator[list[RankGroup]]:
    """The groups of `size` ranks in `num_stages` stages; an exchange without its counterpart fails in the end.
    `is_shared`: they gather in shared memory, as on one machine."""
    store, groups = distributed.HashStore(), {}
    memory = RankMemory.create(size) if is_shared else None

    def join_rank(rank: int) -> None:
        groups[rank] = joining.join(rank, size, store, torch.device(device), memory, num_stages=num_stages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_UNLIMITED", timedelta(seconds=TIMEOUT_S))
        threads = [threading.Thread(target=join_rank, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    yield [groups[rank] for rank in range(size)]


@contextmanager
def shared_runner(config: EngineConfig, size: int, num_stages: int = 1) -> Iterator[ModelRunner]:
    """Rank 0's runner of a model that `size` ranks in `num_stages` stages share."""
    faults: list[BaseException] = []

    def follow_rank(group: RankGroup, loaded: tuple) -> None:
        try:
            follow_model(replace(config, ranks=group), *loaded)
        except BaseException as error:
            faults.append(error)

    with joined(size, num_stages) as groups:
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


def compile_one_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """Processes may compile at the same time, but these ranks share the tracer of their process."""
    lock, compile_call = threading.Lock(), forward.compile_call

    def compile_alone(*arguments: Any) -> Any:
        with lock:
            return compile_call(*arguments)

    patch.setattr(forward, "compile_call", compile_alone)


def config_of(directory: str, dtype: Any = "float32", **settings: Any) -> EngineConfig:
    return EngineConfig(directory, dtype=dtype, **({"num_pages": 64, "compile": "off", "self_check": False} | settings))


def bits_of(runner: ModelRunner) -> list[Tensor]:
    """Logits of a ragged batch, of a sequence in chunks, and after an accepted path of a draft tree."""
    found = forward_together(runner, SEQUENCES)
    found.append(forward_in_chunks(runner, SEQUENCES[0], 5))
    ids, parents, path = SEQUENCES[0][:9], [-1, -1, 1, 0, 2], [1, 2, 4]
    page_ids, _ = runner.page_table.allocate([*ids, 1, 2, 3, 4, 5, 6])
    found.append(runner.forward([Segment(page_ids, 0, ids, 1)]).logits.clone())
    tree = Segment(page_ids, len(ids), [31, 32, 33, 34, 35], 5, parents, num_committed=len(ids))
    found.append(runner.forward([tree]).logits.clone())
    runner.compact([KeptPath(page_ids, len(ids), path)])
    found.append(runner.forward([Segment(page_ids, len(ids) + len(path), [40], 1)]).logits.clone())
    runner.page_table.release(page_ids)
    return found
