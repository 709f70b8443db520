"""For adaptive draft lengths, drafters receive the cost of drafts; pauses follow empty drafts."""

import math

import pytest

from betoken.router.policy.draft_terms import draft_terms
from betoken.v1.types_pb2 import Load, StepCost
from tests.router.conftest import MakeCluster
from tests.router.harness import Cluster

PROMPT = [5, 6, 7]


async def priced(make_cluster: MakeCluster, **options) -> Cluster:
    """A cluster whose verify worker says what rows cost."""
    cluster = await make_cluster(**options)
    for verifier in cluster.verifiers:
        verifier.tokens_per_s, verifier.row_price = 1000.0, 0.25
    await cluster.generate(prompt_ids=PROMPT, max_new_tokens=2, ignore_eos=True)  # the router hears of it
    for drafter in cluster.drafters:
        drafter.requests = []
    return cluster


def test_draft_terms_count_in_tokens():
    assert draft_terms(Load(running=4), 16, 0.002) is None, "the worker's speed is not known"
    terms = draft_terms(Load(running=4, tokens_per_s=1000.0, row_price=0.5), 16, 0.002)
    assert terms is not None
    assert (terms.max_tokens, terms.row_price) == (16, 0.5)
    assert terms.min_gain == pytest.approx(0.75 * 0.002 * 1000 / 4), "what one sequence would emit while it waits"


@pytest.mark.parametrize("speed", [math.nan, math.inf, -1.0])
def test_without_a_valid_speed_there_are_no_draft_terms(speed: float) -> None:
    assert draft_terms(Load(running=4, tokens_per_s=speed, row_price=0.5), 16, 0.0) is None


@pytest.mark.parametrize("price", [math.nan, -1.0])
async def test_an_invalid_row_price_costs_no_request_its_drafts(make_cluster: MakeCluster, price: float) -> None:
    """A draft worker would refuse it, and the request's own settings would be blamed."""
    cluster = await make_cluster()
    cluster.verifiers[0].tokens_per_s, cluster.verifiers[0].row_price = 1000.0, price
    options = {"prompt_ids": PROMPT, "max_new_tokens": 20, "ignore_eos": True, "drafter": "ngram"}
    await cluster.generate(**options)  # the router hears of it
    cluster.drafters[0].requests = []
    reply = await cluster.generate(**options, drafter_settings={"max_ngram": "4"})
    assert reply.ids == cluster.target_ids(20, PROMPT)
    assert {request.HasField("terms") for request in cluster.drafters[0].requests} == {False}


async def test_a_request_without_a_draft_length_gets_an_adaptive_one(make_cluster: MakeCluster) -> None:
    cluster = await priced(make_cluster)
    (drafter,) = cluster.drafters
    drafter.heeds_terms, drafter.agreement = True, 1.0
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=60, ignore_eos=True)
    assert reply.ids == cluster.target_ids(60, PROMPT)
    first, *_, last = drafter.requests
    assert (first.num_tokens, first.terms.max_tokens, first.terms.row_price) == (5, 16, 0.25)
    assert last.terms.max_tokens < 16, "no more than the answer has room for"
    assert reply.finish.speculation.num_draft_tokens / reply.finish.speculation.num_drafts > 5


@pytest.mark.parametrize(("ns_of_eight", "num_tokens"), [(1_100_000, 2), (7_900_000, 1)])
async def test_a_first_draft_length_follows_the_workers_step_times(
    make_cluster: MakeCluster, ns_of_eight: int, num_tokens: int
) -> None:
    costs = [StepCost(rows=1, context=64, ns=1_000_000), StepCost(rows=8, context=64, ns=ns_of_eight)]
    cluster = await make_cluster(verify_hellos=[{"step_costs": costs}])
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=60, ignore_eos=True)
    assert reply.ids == cluster.target_ids(60, PROMPT)
    first = next(request for request in cluster.drafters[0].requests if request.base_length >= len(PROMPT))
    assert first.num_tokens == num_tokens


async def test_a_requested_draft_length_is_used(make_cluster: MakeCluster) -> None:
    cluster = await priced(make_cluster)
    (drafter,) = cluster.drafters
    drafter.heeds_terms = True
    await cluster.generate(prompt_ids=PROMPT, max_new_tokens=30, ignore_eos=True, num_draft_tokens=7)
    assert {request.HasField("terms") for request in drafter.requests} == {False}
    assert drafter.requests[0].num_tokens == 7


async def test_the_smaller_of_both_workers_limits_counts(make_cluster: MakeCluster) -> None:
    limits = [{"max_draft_tokens": number} for number in (9, 12)]
    cluster = await priced(make_cluster, verify_hellos=limits[:1], draft_hellos=limits[1:])
    cluster.drafters[0].heeds_terms = True
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=40, ignore_eos=True)
    assert cluster.drafters[0].requests[0].terms.max_tokens == 9
    assert reply.ids == cluster.target_ids(40, PROMPT)


async def test_more_decode_steps_follow_each_empty_draft(make_cluster: MakeCluster) -> None:
    cluster = await priced(make_cluster)
    cluster.drafters[0].faults.is_empty = True
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=40, ignore_eos=True)
    assert reply.ids == cluster.target_ids(40, PROMPT)
    # Asked after 0, 2, 6, 14, 22, 30 and 38 tokens.
    stats = reply.finish.speculation
    assert (stats.num_drafts, stats.num_rounds, stats.num_verify_forwards) == (0, 7, 40)


async def test_a_draft_that_is_not_empty_ends_the_pauses(make_cluster: MakeCluster) -> None:
    cluster = await priced(make_cluster)
    (drafter,) = cluster.drafters
    drafter.faults.empty_answers = 3
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=60, ignore_eos=True)
    assert reply.ids == cluster.target_ids(60, PROMPT)
    stats = reply.finish.speculation
    assert stats.num_rounds == stats.num_drafts + 3 and stats.num_drafts > 5
    drafter.faults.empty_answers = 1
    drafter.requests = []
    stats = (await cluster.generate(prompt_ids=PROMPT, max_new_tokens=4, ignore_eos=True)).finish.speculation
    assert (stats.num_rounds, len(drafter.requests)) == (2, 2), "2 plain steps, a draft"


async def test_a_row_price_at_which_no_draft_is_made_is_tried_again(make_cluster: MakeCluster) -> None:
    """No forward would meet it, so it would stay, right or wrong."""
    cluster = await priced(make_cluster)
    (drafter,), (verifier,) = cluster.drafters, cluster.verifiers
    drafter.heeds_terms, verifier.row_price = True, 2.0
    options = {"prompt_ids": PROMPT, "max_new_tokens": 100, "ignore_eos": True}
    await cluster.generate(**options)  # the router hears of it
    num_answers = num_drafts = 0
    while not num_drafts and num_answers < 100:  # the policy may be off for a while
        reply = await cluster.generate(**options)
        assert reply.ids == cluster.target_ids(100, PROMPT)
        num_answers, num_drafts = num_answers + 1, reply.finish.speculation.num_drafts
    assert num_drafts == 1 and num_answers > 3
