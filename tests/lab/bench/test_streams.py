"""Bounded runs: order, bound, and no work left behind when one fails."""

import asyncio

import pytest

from betoken.bench.disturber import STRIKE_SHARES, Disturber
from betoken.bench.streams import run_bounded


async def test_results_keep_their_order_and_the_bound_holds() -> None:
    running = most = 0

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (5 - item % 5))
        running -= 1
        return 2 * item

    assert await run_bounded(range(20), work, 4) == [2 * item for item in range(20)]
    assert most == 4


async def test_an_error_is_raised_and_the_rest_is_cancelled() -> None:
    ended: list[int] = []

    async def work(item: int) -> None:
        if item == 0:
            raise RuntimeError("broken")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(item)

    with pytest.raises(RuntimeError, match="broken"):
        async with asyncio.timeout(30):
            await run_bounded([1, 0, 2], work, 3)
    assert sorted(ended) == [1, 2]


@pytest.mark.parametrize(("num_tokens", "num_strikes"), [(0, 0), (6, 1), (32, 2), (100, len(STRIKE_SHARES))])
async def test_the_disturber_injects_faults_and_recovers_in_turn(num_tokens: int, num_strikes: int) -> None:
    events: list[str] = []

    async def strike() -> None:
        events.append("strike")

    async def recover() -> None:
        events.append("mend")

    disturber = Disturber(100, strike, recover)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(disturber.run())
        for _ in range(num_tokens):
            disturber.streamed(1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        disturber.finish()
    assert events == ["strike", "mend"] * num_strikes
    assert disturber.num_strikes == num_strikes
