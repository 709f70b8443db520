"""A client that does not read loses its pages soon, its place later, and can resume its answer."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.raw_http2 import RawConnection
from tests.router.harness import GENERATE, MakeCluster, reply_of, request

LONG = 1000
"""Tokens of an answer that fills the window of a client that does not read."""
ANSWER: dict[str, Any] = {"prompt_ids": [9, 8, 7], "ignore_eos": True, "temperature": 0}


async def test_unread_answers_block_others_no_longer_than_their_timeout(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(max_unread_s=2.0, verify_hellos=[{"max_sequences": 8}])
    async with RawConnection(cluster.address, window=0) as stranger:
        for _ in range(8):  # few: all must run before the first one's timeout
            stranger.call(GENERATE, request(**ANSWER, max_new_tokens=LONG))
        await cluster.until(lambda: cluster.router.admission.num_running == 8)
        asked_s = time.monotonic()
        reply = await cluster.generate(**ANSWER, max_new_tokens=5)
        assert time.monotonic() - asked_s < 4.0
        assert reply.ids == cluster.target_ids(5, [9, 8, 7])
    await cluster.until_idle()


@pytest.mark.parametrize("num_tokens", [3, LONG], ids=["complete", "not-complete"])
async def test_an_unread_answer_ends_with_advice(make_cluster: MakeCluster, num_tokens: int) -> None:
    cluster = await make_cluster(max_unread_s=0.3)
    async with RawConnection(cluster.address, window=0) as stranger:
        stream = stranger.call(GENERATE, request(**ANSWER, max_new_tokens=num_tokens))
        await cluster.until(lambda: cluster.router.admission.num_running == 1)
        await cluster.until(lambda: cluster.router.admission.num_running == 0, within_s=5)
        await cluster.until_idle()
        assert stream not in stranger.ended
        stranger.open_window(stream)  # it reads after all
        await cluster.until(lambda: stream in stranger.ended, within_s=5)
        assert b"unread" in stranger.headers[stream] and stream not in stranger.reset


async def test_an_answer_that_was_read_in_part_is_resumed_from_there(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(max_unread_s=0.3)
    whole = await cluster.generate(**ANSWER, max_new_tokens=LONG)
    async with RawConnection(cluster.address, window=3000) as slow:
        stream = slow.call(GENERATE, request(**ANSWER, max_new_tokens=LONG))
        await cluster.until(lambda: cluster.router.admission.num_running == 1)
        await cluster.until(lambda: cluster.router.admission.num_running == 0, within_s=5)
        reply = reply_of(slow, stream)
    assert 0 < len(reply.ids) < LONG and reply.ids == whole.ids[: len(reply.ids)]
    rest = await cluster.generate(
        **ANSWER, max_new_tokens=LONG, resume_ids=reply.ids, system_fingerprint=reply.start.system_fingerprint
    )
    assert reply.ids + rest.ids == whole.ids and reply.text + rest.text == whole.text
    await cluster.until_idle()


@pytest.mark.parametrize("options", [{}, {"off": True}, {"num_draft_tokens": 4}], ids=str)
async def test_a_client_that_is_behind_holds_no_pages_and_gets_the_same_tokens(
    make_cluster: MakeCluster, options: dict[str, Any]
) -> None:
    cluster = await make_cluster(max_unread_s=60.0)
    whole = await cluster.generate(**ANSWER, max_new_tokens=LONG)
    workers = (*cluster.verifiers, *cluster.drafters)
    async with RawConnection(cluster.address, window=3000) as slow:
        stream = slow.call(GENERATE, request(**ANSWER, max_new_tokens=LONG, **options))
        await cluster.until(lambda: cluster.router.admission.num_running == 1 and cluster.verifiers[0].num_open == 1)
        await cluster.until(lambda: not any(worker.num_open for worker in workers), within_s=5)
        assert cluster.router.admission.num_running == 1 and len(reply_of(slow, stream).ids) < LONG
        slow.open_window(stream)
        await cluster.until(lambda: stream in slow.ended)
        reply = reply_of(slow, stream)
    assert reply.ids == whole.ids and reply.text == whole.text
    assert reply.finish.speculation.num_failovers == 0
    await cluster.until_idle()
