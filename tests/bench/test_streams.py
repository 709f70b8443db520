"""Bounded runs: order, bound, and no work left behind when one fails."""

import asyncio

import pytest

from foretoken.bench.disturber import STRIKE_SHARES, Disturber
from foretoken.bench.streams import run_bounded


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
        async with asyncio.timeout(5):
            await run_bounded([1, 0, 2], work, 3)
    assert sorted(ended) == [1, 2]


async def test_the_disturber_strikes_and_mends_in_turn_and_leaves_it_mended() -> None:
    events: list[str] = []

    async def strike() -> None:
        events.append("strike")

    async def mend() -> None:
        events.append("mend")

    disturber = Disturber(100, strike, mend)
    task = asyncio.ensure_future(disturber.run())
    for _ in range(85):
        disturber.streamed(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert events == ["strike", "mend"] * len(STRIKE_SHARES)
    assert disturber.num_strikes == len(STRIKE_SHARES)
