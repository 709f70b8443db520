"""A drafter whose drafts turn wrong is resynchronised and continues to draft; no token changes."""

import pytest

from tests.router.conftest import MakeCluster

PROMPT = [1, 2, 3]


async def test_a_drafter_whose_acceptance_collapses_is_resynchronised(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await make_cluster()
    drafter = cluster.drafters[0]

    async def collapses(agreement: float, num_answers: int) -> int:
        """Sequences opened again because of a collapse, over answers with drafts of this agreement."""
        drafter.agreement, num_blocks, number = agreement, drafter.num_blocks, 0
        for _ in range(num_answers):
            reply = await cluster.generate(
                prompt_ids=PROMPT, max_new_tokens=120, ignore_eos=True, num_draft_tokens=4, drafter="model"
            )
            assert reply.ids == cluster.target_ids(120, PROMPT)
            number += reply.finish.speculation.num_failed_drafts_by_reason["collapse"]
        assert drafter.num_blocks - num_blocks >= 20 * num_answers  # never switched off
        return number

    assert await collapses(0.8, 5) == 0
    assert await collapses(0.0, 2) == 1
    assert caplog.text.count("the acceptance of drafter model at") == 1
    assert await collapses(0.8, 2) == 0
    await cluster.until_idle()


async def test_overlap_is_requested_by_itself_once_it_pays_off(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(overlap="auto", overlap_outcomes=4)
    drafter = cluster.drafters[0]
    drafter.step_s, cluster.verifiers[0].step_s = 0.008, 0.02
    options = {"prompt_ids": PROMPT, "ignore_eos": True, "num_draft_tokens": 2}
    await cluster.generate(max_new_tokens=20, **options)
    assert drafter.requests and not any(request.num_outcomes for request in drafter.requests)
    await cluster.generate(max_new_tokens=120, **options)
    assert 4 in {request.num_outcomes for request in drafter.requests}
