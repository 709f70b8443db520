"""A worker that says again and again that its link is amiss is logged once and left; nothing else stops for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from betoken.common.errors import FailedPreconditionError, InternalError
from betoken.rpc.link import faults
from betoken.rpc.link.faults import MAX_LINK_FAULTS, PERIOD_S, LinkFaults
from betoken.v1.draft_pb2 import DraftLinkResponse
from betoken.v1.types_pb2 import LinkError
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.clock import Clock
from tests.router.harness import MakeCluster


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == faults.__name__]


@pytest.mark.parametrize("role", ["verify", "draft"])
async def test_a_flood_of_faults_is_one_line_and_a_count_and_ends_the_link(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    caplog.set_level(logging.INFO)
    cluster = await make_cluster(num_verifiers=2)
    pool: Any = getattr(cluster.router, role)
    fake: Any = {"verify": cluster.verifiers, "draft": cluster.drafters}[role][0]
    frame_type: Any = {"verify": VerifyLinkResponse, "draft": DraftLinkResponse}[role]
    running = asyncio.ensure_future(cluster.generate(prompt_ids=[5, 6], temperature=0, max_new_tokens=300))
    await cluster.until(lambda: cluster.router.admission.num_running == 1)
    link, before = fake.links[0], len(caplog.records)
    try:
        await link.context.write(frame_type(errors=[LinkError(code=13, message="x" * 900)] * 4000))
    except (grpc.aio.BaseError, asyncio.InvalidStateError):
        pass
    await cluster.until(lambda: link not in fake.links)
    await cluster.until(lambda: all(worker.is_ready for worker in pool.workers))
    first, count = lines(caplog)
    assert "xxx" in first
    assert count.endswith(f"{MAX_LINK_FAULTS} more faults of the link")
    assert len(caplog.records) - before < 20
    assert sum(len(record.getMessage()) for record in caplog.records[before:]) < 8192
    reply = await running
    assert reply.ids == cluster.target_ids(300, [5, 6], temperature=0.0)[: len(reply.ids)]
    await cluster.until_idle()


async def test_an_occasional_link_fault_ends_no_link(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    seen = LinkFaults("a worker")
    for _ in range(3):
        for _ in range(MAX_LINK_FAULTS):
            seen.take(InternalError("hm"))
        clock.advance(PERIOD_S + 1)
    assert lines(caplog) == (["a worker: hm", f"a worker: {MAX_LINK_FAULTS - 1} more faults of the link"] * 3)[:-1]
    for _ in range(MAX_LINK_FAULTS):
        seen.take(InternalError("hm"))
    with pytest.raises(FailedPreconditionError, match="more than 16 faults"):
        seen.take(InternalError("hm"))
