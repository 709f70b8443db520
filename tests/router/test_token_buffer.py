"""Tokens that wait for a client: sent at once, or merged during a pause; the first and last tokens never wait."""

import asyncio
import time

import pytest

from betoken.router.round.events import EmittedRound
from betoken.router.round.token_buffer import TokenBuffer
from betoken.v1.types_pb2 import TOKEN_ORIGIN_PLAIN

LONG_S = 60.0


def put(buffer: TokenBuffer, *ids: int) -> None:
    count = len(ids)
    text = "".join(chr(96 + token_id) for token_id in ids)
    buffer.put(EmittedRound(ids, [TOKEN_ORIGIN_PLAIN] * count, [""] * count, (), text, [1] * count))


async def taken(buffer: TokenBuffer) -> tuple[list[int], str]:
    tokens = await buffer.get()
    assert tokens is not None
    ids = [token_id for emitted in tokens.rounds for token_id in emitted.ids]
    assert tokens.num_tokens == len(ids)
    return ids, "".join(emitted.text for emitted in tokens.rounds)


async def pausing_reader(buffer: TokenBuffer) -> asyncio.Task[tuple[list[int], str]]:
    """A reader that has taken the first tokens and pauses."""
    put(buffer, 1)
    await taken(buffer)
    reader = asyncio.create_task(taken(buffer))
    await asyncio.sleep(0)
    return reader


async def test_without_a_pause_tokens_are_taken_as_they_come() -> None:
    buffer = TokenBuffer()
    for token_id in (1, 2, 3):
        put(buffer, token_id)
        assert (await taken(buffer))[0] == [token_id]


async def test_the_first_tokens_do_not_pause() -> None:
    buffer = TokenBuffer(pause_s=lambda: LONG_S)
    put(buffer, 1)
    async with asyncio.timeout(LONG_S / 2):
        assert await taken(buffer) == ([1], "a")


async def test_tokens_of_several_rounds_gather_during_a_pause() -> None:
    buffer = TokenBuffer(pause_s=lambda: 0.3)
    started = time.monotonic()
    reader = await pausing_reader(buffer)
    for token_id in (2, 3, 4):
        put(buffer, token_id)
    assert await reader == ([2, 3, 4], "bcd")
    assert time.monotonic() - started >= 0.25


async def test_after_a_pause_without_tokens_the_next_are_taken_as_they_come() -> None:
    buffer = TokenBuffer(pause_s=lambda: 0.01)
    put(buffer, 1)
    await taken(buffer)
    reader = asyncio.create_task(taken(buffer))
    await asyncio.sleep(0.05)
    put(buffer, 2)
    async with asyncio.timeout(LONG_S / 2):
        assert await reader == ([2], "b")


async def test_the_end_of_an_answer_ends_the_pause() -> None:
    buffer = TokenBuffer(pause_s=lambda: LONG_S)
    reader = await pausing_reader(buffer)
    put(buffer, 2)
    buffer.close()
    async with asyncio.timeout(LONG_S / 2):
        assert await reader == ([2], "b")
        assert await buffer.get() is None


async def test_an_error_ends_the_pause_after_the_tokens_before_it() -> None:
    buffer = TokenBuffer(pause_s=lambda: LONG_S)
    reader = await pausing_reader(buffer)
    put(buffer, 2)
    buffer.close(RuntimeError("broken"))
    async with asyncio.timeout(LONG_S / 2):
        assert await reader == ([2], "b")
        with pytest.raises(RuntimeError, match="broken"):
            await buffer.get()


async def test_a_filler_far_ahead_waits_for_a_reader_that_pauses() -> None:
    buffer = TokenBuffer(max_waiting_tokens=2, pause_s=lambda: 0.3)
    reader = await pausing_reader(buffer)
    put(buffer, 2, 3)
    filler = asyncio.create_task(buffer.room())
    await asyncio.sleep(0)
    assert not filler.done()
    assert await reader == ([2, 3], "bc")
    async with asyncio.timeout(LONG_S / 2):
        await filler
