"""What waits for a client: taken as it comes, or gathered for a pause; the first and the last tokens never wait."""

import asyncio
import time

import pytest

from betoken.router.round.outbox import Outbox, Tokens
from betoken.v1.types_pb2 import TOKEN_ORIGIN_PLAIN

LONG_S = 60.0


def put(outbox: Outbox, *ids: int) -> None:
    count = len(ids)
    text = "".join(chr(96 + token_id) for token_id in ids)
    outbox.put(ids, [TOKEN_ORIGIN_PLAIN] * count, [""] * count, (), text, [1] * count)


async def taken(outbox: Outbox) -> tuple[list[int], str]:
    tokens = await outbox.get()
    assert isinstance(tokens, Tokens)
    return tokens.ids, tokens.text


async def pausing_reader(outbox: Outbox) -> asyncio.Task[tuple[list[int], str]]:
    """A reader that has taken the first tokens and pauses."""
    put(outbox, 1)
    await taken(outbox)
    reader = asyncio.create_task(taken(outbox))
    await asyncio.sleep(0)
    return reader


async def test_without_a_pause_tokens_are_taken_as_they_come() -> None:
    outbox = Outbox()
    for token_id in (1, 2, 3):
        put(outbox, token_id)
        assert (await taken(outbox))[0] == [token_id]


async def test_the_first_tokens_do_not_pause() -> None:
    outbox = Outbox(pause_s=lambda: LONG_S)
    put(outbox, 1)
    async with asyncio.timeout(1):
        assert await taken(outbox) == ([1], "a")


async def test_tokens_of_several_rounds_gather_during_a_pause() -> None:
    outbox = Outbox(pause_s=lambda: 0.3)
    started = time.monotonic()
    reader = await pausing_reader(outbox)
    for token_id in (2, 3, 4):
        put(outbox, token_id)
    assert await reader == ([2, 3, 4], "bcd")
    assert time.monotonic() - started >= 0.25


async def test_after_a_pause_without_tokens_the_next_are_taken_as_they_come() -> None:
    outbox = Outbox(pause_s=lambda: 0.01)
    put(outbox, 1)
    await taken(outbox)
    reader = asyncio.create_task(taken(outbox))
    await asyncio.sleep(0.05)
    put(outbox, 2)
    async with asyncio.timeout(1):
        assert await reader == ([2], "b")


async def test_the_end_of_an_answer_ends_the_pause() -> None:
    outbox = Outbox(pause_s=lambda: LONG_S)
    reader = await pausing_reader(outbox)
    put(outbox, 2)
    outbox.close()
    async with asyncio.timeout(1):
        assert await reader == ([2], "b")
        assert await outbox.get() is None


async def test_an_error_ends_the_pause_after_the_tokens_before_it() -> None:
    outbox = Outbox(pause_s=lambda: LONG_S)
    reader = await pausing_reader(outbox)
    put(outbox, 2)
    outbox.close(RuntimeError("broken"))
    async with asyncio.timeout(1):
        assert await reader == ([2], "b")
        with pytest.raises(RuntimeError, match="broken"):
            await outbox.get()


async def test_a_filler_far_ahead_waits_for_a_reader_that_pauses() -> None:
    outbox = Outbox(max_waiting_tokens=2, pause_s=lambda: 0.3)
    reader = await pausing_reader(outbox)
    put(outbox, 2, 3)
    filler = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not filler.done()
    assert await reader == ([2, 3], "bc")
    async with asyncio.timeout(1):
        await filler
