"""The promise: the same tokens, whatever the drafter, its length and its faults."""

from __future__ import annotations

import pytest

from tests.router.harness import MakeCluster


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
async def test_tokens_are_the_targets_own(make_cluster: MakeCluster, num_draft_tokens: int, agreement: float) -> None:
    cluster = await make_cluster(agreement=agreement)
    reply = await cluster.generate(
        prompt_ids=[9, 8, 7], max_new_tokens=60, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )
    assert reply.ids == cluster.target_ids(60, [9, 8, 7])
    assert reply.finish.usage.output_tokens == 60
    await cluster.until_idle()
