"""Hundreds of mutants of every frame that a worker may send: no answer hangs, none is wrong for a draft, none is left.

A verify worker is believed, so that its mutants may change what it decides; a draft worker's never do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import grpc
import pytest

from betoken.testing.mutation import Mutator
from tests.router.harness import Cluster, MakeCluster

NUM_BATCHES = 4
SEED = 20261127
PROMPT = [5, 6, 7]
FIELDS: dict[str, Any] = {"prompt_ids": PROMPT, "temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
IMPATIENT: dict[str, Any] = {
    "failover_timeout_s": 0.5,
    "verify_timeout_s": 0.2,
    "draft_timeout_s": 0.1,
    "max_draft_failures": 1000,
    "min_probe_pause_s": 0.02,
    "max_probe_pause_s": 0.05,
}
OWN_FAULTS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


class Tampering:
    """A hostile worker's mutations of its frames while enabled."""

    def __init__(self) -> None:
        self._mutator = Mutator(SEED)
        self.is_on = False
        self.num_mutants = 0

    def __call__(self, frame: Any) -> Any:
        if not self.is_on or self._mutator.random.random() < 0.5:
            return frame
        self.num_mutants += 1
        return self._mutator.mutant(frame)


async def answer(cluster: Cluster, statuses: Counter[str]) -> list[int]:
    """Result of a request; its status is counted."""
    try:
        reply = await cluster.generate(**FIELDS, deadline_s=60.0)
    except grpc.aio.AioRpcError as error:
        assert error.code() not in OWN_FAULTS, error
        statuses[error.code().name] += 1
        return []
    statuses["OK"] += 1
    return reply.ids


async def until_well(cluster: Cluster, workers: list[Any], expected: list[int]) -> None:
    """Its links are up again, an answer is exact and everything is free."""
    await cluster.until(lambda: all(worker.link.is_up for worker in workers), within_s=60)
    statuses: Counter[str] = Counter()
    assert await answer(cluster, statuses) == expected
    await cluster.until(lambda: not cluster.router.admission.num_running)
    await cluster.until(lambda: not any(worker.num_open for worker in (*cluster.verifiers, *cluster.drafters)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_mutants", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["verify", "draft"])
async def test_mutated_frames_of_a_worker_end_in_answers_or_typed_errors(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture, role: str, num_mutants: int
) -> None:
    caplog.set_level(logging.ERROR)
    numbers = {"num_verifiers": 6} if role == "verify" else {"num_drafters": 6}  # one is dialled while others answer
    cluster = await make_cluster(**numbers, **IMPATIENT)
    expected = cluster.target_ids(40, PROMPT, temperature=0.0)
    fakes: Any = {"verify": cluster.verifiers, "draft": cluster.drafters}[role]
    tampering = Tampering()
    for fake in fakes:
        fake.tamper = tampering
    workers = list(getattr(cluster.router, role).workers)
    statuses: Counter[str] = Counter()
    for batch in range(NUM_BATCHES):
        tampering.is_on = True
        while tampering.num_mutants < num_mutants * (batch + 1) / NUM_BATCHES:
            replies = await asyncio.gather(*(answer(cluster, statuses) for _ in range(16)))
            if role == "draft":
                assert all(reply == expected for reply in replies)
        tampering.is_on = False
        await until_well(cluster, workers, expected)
    assert statuses["OK"] > 0
    untyped = [record for record in caplog.records if "Traceback" in (record.exc_text or "")]
    assert not untyped, untyped[0].exc_text
