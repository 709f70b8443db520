"""The other verification modes through the router: named, passed on, and fed with what the drafter sampled from."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_PLAIN,
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_REJECTION,
    VERIFICATION_MODE_TYPICAL,
    SparseDistribution,
)
from tests.router.harness import Cluster, MakeCluster

PROMPT = [9, 8, 7]
MODES = [VERIFICATION_MODE_COUPLED, VERIFICATION_MODE_REJECTION, VERIFICATION_MODE_TYPICAL]
OPTIONS: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 30, "num_draft_tokens": 3}


def blocks_sent(cluster: Cluster) -> list[Any]:
    """Every drafted block the verify worker gets from now on."""
    blocks: list[Any] = []
    worker = cluster.verifiers[0]
    take = worker.take

    def record(link: Any, frame: Any) -> None:
        blocks.extend(block for block in frame.blocks if block.draft_ids)
        take(link, frame)

    worker.take = record  # type: ignore[method-assign]
    return blocks


def draft_with(cluster: Cluster, probs_of: Any) -> None:
    """The draft worker sends `probs_of(ids)` with every block."""
    worker = cluster.drafters[0]
    step = worker.step

    def spoilt(started_ns: int) -> Any:
        frames = step(started_ns)
        for _, frame in frames:
            for block in frame.blocks:
                block.draft_probs.extend(probs_of(list(block.ids)))
        return frames

    worker.step = spoilt  # type: ignore[method-assign]


def honest(ids: list[int]) -> list[SparseDistribution]:
    return [SparseDistribution(token_ids=[token_id, 0], probs=[0.75, 0.25]) for token_id in ids]


async def make_offering(make_cluster: MakeCluster, **fields: Any) -> Cluster:
    return await make_cluster(verify_hellos=[{"verification_modes": MODES[1:]}], **fields)


@pytest.mark.parametrize("mode", MODES)
async def test_the_mode_is_named_and_sent_to_both_workers(make_cluster: MakeCluster, mode: int) -> None:
    cluster = await make_offering(make_cluster)
    sent = blocks_sent(cluster)
    draft_with(cluster, honest)
    reply = await cluster.generate(**OPTIONS, mode=mode)
    assert reply.start.mode == mode
    assert cluster.verifiers[0].opened[-1].mode == cluster.drafters[0].opened[-1].mode == mode
    assert sent
    for block in sent:
        expected = honest(list(block.draft_ids)) if mode == VERIFICATION_MODE_REJECTION else []
        assert list(block.draft_probs) == expected
    await cluster.until_idle()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: [SparseDistribution(token_ids=[token_id], probs=[0.5]) for token_id in ids],
        lambda ids: [SparseDistribution(token_ids=[token_id + 1], probs=[1.0]) for token_id in ids],
        lambda ids: [SparseDistribution(token_ids=[token_id, 10**6], probs=[0.5, 0.5]) for token_id in ids],
        lambda ids: [SparseDistribution() for _ in ids],
    ],
    ids=["sum", "without the token", "foreign id", "empty"],
)
async def test_a_distribution_that_is_none_makes_its_token_certain(make_cluster: MakeCluster, spoil: Any) -> None:
    cluster = await make_offering(make_cluster)
    sent = blocks_sent(cluster)
    draft_with(cluster, lambda ids: [*honest(ids)[:1], *spoil(ids[1:])])
    reply = await cluster.generate(**OPTIONS, mode=VERIFICATION_MODE_REJECTION)
    assert len(reply.ids) == 30
    for block in sent:
        certain = [SparseDistribution(token_ids=[token_id], probs=[1.0]) for token_id in block.draft_ids]
        assert list(block.draft_probs) == [*honest(list(block.draft_ids))[:1], *certain[1:]]
    assert reply.finish.speculation.num_failed_drafts == 0


@pytest.mark.parametrize("mode", MODES[1:])
async def test_when_the_first_draft_comes_does_not_choose_tokens(make_cluster: MakeCluster, mode: int) -> None:
    cluster = await make_offering(make_cluster, draft_timeout_s=0.1, first_draft_timeout_s=20.0)
    drafter = cluster.drafters[0]
    drafter.prefill_rows, drafter.step_s = 1, 0.01  # 60 ids: 59 steps, 0.6 s
    reply = await cluster.generate(**OPTIONS | {"prompt_ids": [1 + i % 5 for i in range(60)]}, mode=mode)
    assert reply.tokens[0].origin != TOKEN_ORIGIN_PLAIN
    await cluster.until_idle()


async def test_too_few_distributions_make_the_other_tokens_certain(make_cluster: MakeCluster) -> None:
    cluster = await make_offering(make_cluster)
    sent = blocks_sent(cluster)
    draft_with(cluster, lambda ids: honest(ids)[:1])
    await cluster.generate(**OPTIONS, mode=VERIFICATION_MODE_REJECTION)
    assert any(len(block.draft_ids) == 3 for block in sent)
    assert all(len(block.draft_probs) == len(block.draft_ids) for block in sent)


async def test_a_rejected_mode_lists_the_modes_of_a_newer_worker(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"verification_modes": [99]}])  # besides COUPLED
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(**OPTIONS, mode=VERIFICATION_MODE_TYPICAL)
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError) and error.field == "speculation.mode"
    assert error.limit == "must be one of: VERIFICATION_MODE_COUPLED"


async def test_a_lost_verify_worker_is_replaced_in_the_same_mode(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"verification_modes": MODES[1:]}] * 2)
    draft_with(cluster, honest)
    first, second = cluster.verifiers
    first.faults.error_code = second.faults.error_code = 13  # the next block on each is lost
    reply = await cluster.generate(**OPTIONS, mode=VERIFICATION_MODE_REJECTION)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    assert reply.finish.speculation.num_failovers >= 1
    assert {entry.mode for entry in (*first.opened, *second.opened)} == {VERIFICATION_MODE_REJECTION}
    await cluster.until_idle()
