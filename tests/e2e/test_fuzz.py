"""Hundreds of mutants of every message that a client or a router may send: each is answered, and nothing is left.

After each batch an answer is what it was before, and all pages and places are free. `python -m betoken.bench.fuzz` does
more of it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from betoken.bench.fuzz import seeds
from betoken.bench.fuzz.campaign import fuzz_calls, fuzz_link
from betoken.bench.fuzz.check import HealthCheck
from betoken.testing.mutation import Mutator
from tests.e2e.in_process import CheckIntegrity, Running, running, save_pair

NUM_MUTANTS = [400, pytest.param(4000, marks=pytest.mark.slow)]
SEED = 20261127

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    async with running(folder) as services:
        yield services


@pytest_asyncio.fixture(loop_scope="module")
async def check(services: Running, caplog: pytest.LogCaptureFixture) -> Callable[[], Awaitable[None]]:
    """Checks after each batch."""
    health = await HealthCheck.begin(services.client, "the quick brown fox")

    async def check() -> None:
        await health.check()
        faults = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert not faults, faults[0].getMessage()
        for thread in services.threads:
            command = CheckIntegrity()
            thread.submit([command])
            await asyncio.wait_for(asyncio.wrap_future(command.checked), 30)

    return check


@pytest.mark.parametrize("num_mutants", NUM_MUTANTS)
@pytest.mark.parametrize("method", sorted(seeds.calls()))
async def test_mutated_calls_are_answered_and_leave_nothing(
    services: Running, check: Any, method: str, num_mutants: int
) -> None:
    statuses = await fuzz_calls(services.address, method, seeds.calls()[method], Mutator(SEED), num_mutants, check)
    assert sum(statuses.values()) == num_mutants
    assert statuses["INVALID_ARGUMENT"] > 20, "mutants were refused"
    assert statuses["OK"] + statuses["CANCELLED"] > 20, "mutants were served"
    assert not statuses.keys() & {"UNAVAILABLE", "UNIMPLEMENTED"}


@pytest.mark.parametrize("num_mutants", NUM_MUTANTS)
@pytest.mark.parametrize("role", ["verify", "draft"])
async def test_mutated_frames_of_a_router_do_not_disturb_other_routers(
    services: Running, check: Any, role: str, num_mutants: int
) -> None:
    address = getattr(services, role)
    frames = getattr(seeds, f"{role}_frames")
    statuses: Counter[str] = await fuzz_link(address, role, frames, Mutator(SEED), num_mutants, check)
    assert statuses["INVALID_ARGUMENT"] > 5, "links were ended for what came over them"
    assert statuses["CANCELLED"] > 5, "links went on whose frames were refused by the entry"
