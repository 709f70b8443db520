"""A draft worker that hangs costs each answer one short wait, whatever the state of its drafting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from betoken.router.round.drafting import DraftingState
from betoken.router.round.speculator import Speculator
from betoken.testing.fake_draft_worker import FakeDraftWorker
from betoken.v1.types_pb2 import TOKEN_ORIGIN_ACCEPTED
from tests.router.harness import Cluster, MakeCluster

PROMPT = [1 + i % 5 for i in range(60)]
OPTIONS: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "num_draft_tokens": 4}
TIMEOUT_S = 0.2


def hang(drafter: FakeDraftWorker) -> None:
    drafter.faults.is_silent = True


def prefill(drafter: FakeDraftWorker) -> None:
    """Every open sequence computes its prompt, again if need be, and is pending meanwhile."""
    drafter.prefill_rows, drafter.step_s = 1, 0.01
    for link in drafter.links:
        for sequence in link.sequences.values():
            sequence.num_missing_kv = 10_000


def refuse(drafter: FakeDraftWorker) -> None:
    drafter.faults.error_code = 3


BEFORE: dict[DraftingState, Callable[[FakeDraftWorker], None] | None] = {
    DraftingState.CLOSED: hang,
    DraftingState.PREFILLING: hang,
    DraftingState.PREFILLING_LATE: prefill,
    DraftingState.READY: None,
    DraftingState.LATE: None,
    DraftingState.REFUSED: refuse,
}
"""Fault at the start that leads to the state in which the worker hangs."""


async def waits_of_a_hang(
    cluster: Cluster, state: DraftingState, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], set[DraftingState]]:
    """Seconds that each round without a draft waited for it, and the states in which the worker hung."""
    drafter, waits_s, hung_in = cluster.drafters[0], list[float](), set[DraftingState]()
    draft, commit = Speculator.draft, Speculator.commit
    if (fault := BEFORE[state]) is not None:
        fault(drafter)

    async def timed(speculator: Speculator, *arguments: Any, **options: Any) -> Any:
        started_s = time.monotonic()
        came = await draft(speculator, *arguments, **options)
        if not came.ids:
            waits_s.append(time.monotonic() - started_s)
        return came

    def stepped(speculator: Speculator, base_length: int, *arguments: Any) -> None:
        if base_length > len(PROMPT) + 40 and state is DraftingState.LATE and drafter.prefill_rows == 0:
            prefill(drafter)
        if speculator._state is state or drafter.faults.is_silent:
            hung_in.add(speculator._state)
            if base_length > len(PROMPT) + 20:
                hang(drafter)
        commit(speculator, base_length, *arguments)

    monkeypatch.setattr(Speculator, "draft", timed)
    monkeypatch.setattr(Speculator, "commit", stepped)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=150)
    assert reply.ids == cluster.target_ids(150, PROMPT)
    return waits_s, hung_in


@pytest.mark.parametrize("state", DraftingState)
async def test_a_draft_that_is_missed_is_one_short_wait_in_every_drafting_state(
    make_cluster: MakeCluster, state: DraftingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster(
        draft_timeout_s=TIMEOUT_S, first_draft_timeout_s=20.0, min_probe_pause_s=60.0, step_s=0.01
    )
    waits_s, hung_in = await waits_of_a_hang(cluster, state, monkeypatch)
    missed_s = [wait_s for wait_s in waits_s if wait_s >= TIMEOUT_S]
    assert hung_in and cluster.drafters[0].faults.is_silent
    assert len(missed_s) <= 1 and sum(missed_s) < 3.0, f"drafts were waited for {missed_s} s"
    monkeypatch.undo()
    await cluster.until_idle()


async def test_a_silent_draft_worker_is_not_asked_until_it_gives_a_sign(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=TIMEOUT_S, min_probe_pause_s=60.0, step_s=0.01)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.is_silent = True
    first = await cluster.generate(**OPTIONS, max_new_tokens=20)
    assert first.finish.speculation.num_failed_drafts == 1 and not worker.is_ready
    second = await cluster.generate(**OPTIONS, max_new_tokens=20)
    assert second.finish.speculation.num_failed_drafts == 0
    drafter.faults.is_silent = False
    await drafter.drain()
    await cluster.until(lambda: not worker.is_silent)
    await cluster.until_idle()


async def test_an_answer_moves_from_a_silent_draft_worker_to_another(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2, draft_timeout_s=TIMEOUT_S, min_probe_pause_s=60.0, step_s=0.01)
    for drafter in cluster.drafters:
        drafter.agreement = 1.0
    cluster.drafters[0].faults.is_silent = True
    reply = await cluster.generate(**OPTIONS, max_new_tokens=100)
    assert reply.ids == cluster.target_ids(100, PROMPT)
    assert reply.finish.speculation.num_failed_drafts <= 1
    assert TOKEN_ORIGIN_ACCEPTED in [token.origin for token in reply.tokens]
    await cluster.until_idle()
