"""The drafter `auto`: chosen among all drafters by measured speed, and reported."""

from __future__ import annotations

from typing import Any

import pytest

from betoken.common.economy.source_rates import SourceRates
from betoken.router.round.speculation_policies import DraftSource
from betoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED, VERIFICATION_MODE_REJECTION
from tests.router.harness import Cluster, MakeCluster, Reply

PROMPT = [9, 8, 7]
LONG: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 400, "temperature": 0.0}
NGRAM, MODEL = DraftSource("ngram", False), DraftSource("model", False)


def measured(cluster: Cluster, **token_s: float) -> SourceRates[DraftSource]:
    """The rates of greedy requests, with these measured seconds per token."""
    rates = cluster.router.policies._rates.setdefault((False, False), SourceRates())
    for name, seconds in token_s.items():
        rates.add(DraftSource(name, False), 0, 4000, 4000 * seconds)
    return rates


def sources(reply: Reply) -> set[str]:
    return {token.source for token in reply.tokens if token.source}


@pytest.mark.parametrize("fields", [{}, {"drafter": "auto"}], ids=str)
async def test_auto_starts_with_the_drafter_that_measured_best(
    make_cluster: MakeCluster, fields: dict[str, Any]
) -> None:
    cluster = await make_cluster()
    measured(cluster, model=0.02, ngram=0.01)
    reply = await cluster.generate(**LONG | {"max_new_tokens": 60}, **fields)
    assert reply.ids == cluster.target_ids(60, PROMPT, temperature=0.0)
    assert reply.start.drafter == reply.finish.speculation.policy.drafter == "ngram" and sources(reply) == {"ngram"}


async def test_a_named_drafter_is_used_although_another_measured_better(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    measured(cluster, model=0.02, ngram=0.01)
    reply = await cluster.generate(**LONG, drafter="model", num_draft_tokens=4)
    assert sources(reply) == {"model"} and reply.start.drafter == "model"


async def test_auto_changes_the_drafter_of_a_sequence_to_a_faster_one(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    rates = measured(cluster, model=1e-9)
    reply = await cluster.generate(**LONG, num_draft_tokens=4)
    assert reply.ids == cluster.target_ids(400, PROMPT, temperature=0.0)
    assert sources(reply) == {"model", "ngram"} and rates.token_s(NGRAM, 0) is not None
    await cluster.until_idle()


@pytest.mark.parametrize(
    "fields",
    [{"mode": VERIFICATION_MODE_REJECTION}, {"drafter_settings": {"max_ngram": "9"}}],
    ids=["mode", "settings"],
)
async def test_auto_is_the_default_drafter_if_tokens_or_settings_depend_on_it(
    make_cluster: MakeCluster, fields: dict[str, Any]
) -> None:
    modes = [VERIFICATION_MODE_COUPLED, VERIFICATION_MODE_REJECTION]
    cluster = await make_cluster(verify_hellos=[{"verification_modes": modes}])
    measured(cluster, model=0.02, ngram=0.01)
    reply = await cluster.generate(**LONG | {"max_new_tokens": 20}, num_draft_tokens=4, drafter="auto", **fields)
    assert reply.start.drafter == "model" and sources(reply) <= {"model"}


async def test_auto_is_available_although_another_drafter_is_the_default(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(drafter="model")
    measured(cluster, model=0.02, ngram=0.01)
    assert (await cluster.generate(**LONG)).start.drafter == "model"
    assert (await cluster.generate(**LONG, drafter="auto")).start.drafter == "ngram"


async def test_auto_leaves_a_drafter_whose_worker_is_lost(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{}, {"drafters": ["late"]}])
    measured(cluster, model=0.02, ngram=0.03, late=0.01)
    await cluster.drafters[1].kill()
    await cluster.until(lambda: not cluster.router.draft.workers[1].link.is_up)
    reply = await cluster.generate(**LONG | {"max_new_tokens": 60}, num_draft_tokens=4)
    assert reply.start.drafter == "model" and reply.finish.speculation.num_accepted_tokens > 0


async def test_auto_without_any_drafter_decodes_without_speculation(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=0)
    reply = await cluster.generate(**LONG)
    assert reply.ids == cluster.target_ids(400, PROMPT, temperature=0.0) and reply.start.drafter == ""
