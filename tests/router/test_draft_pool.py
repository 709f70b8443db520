"""Draft workers that fail, hang, drain, fill up and come back: the tokens stay the target's own."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from betoken.router.request.generation import GenerationRequest
from betoken.router.round import speculator
from betoken.router.round.draft_timeouts import DraftTimeouts
from betoken.router.round.speculator import Speculator
from betoken.rpc.sampling import resolve_sampling
from betoken.v1.draft_pb2 import DraftedBlock, DraftLinkResponse
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_PLAIN,
    VERIFICATION_MODE_COUPLED,
    DrafterChoice,
    Load,
    SamplingParams,
)
from tests.router.harness import (
    OPTIONS,
    PROMPT,
    MakeCluster,
    generate_and,
    generate_while_one_drains,
)


@pytest.mark.parametrize(
    "fault",
    [
        {"wrong_base": True},
        {"wrong_next_id": True},
        {"bad_ids": True},
        {"too_many": True},
        {"is_empty": True},
        {"no_sources": True},
        {"bad_sources": True},
        {"bad_times": True},
        {"is_tree": True},
        {"is_silent": True},
        {"error_code": 13},
        {"error_code": 9},
        {"error_code": 8},
    ],
    ids=lambda fault: "-".join(f"{name}{value}" for name, value in fault.items()),
)
async def test_a_drafter_that_errs_costs_time_only(make_cluster: MakeCluster, fault: dict[str, Any]) -> None:
    timeout_s = 0.05 if "is_silent" in fault else 5.0  # a busy machine is late, too
    cluster = await make_cluster(draft_timeout_s=timeout_s, first_draft_timeout_s=timeout_s)
    drafter = cluster.drafters[0]

    async def spoil() -> None:
        for name, value in fault.items():
            setattr(drafter.faults, name, value)

    reply = await generate_and(cluster, 80, 10, spoil)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    is_failure = fault.keys() & {"wrong_base", "wrong_next_id", "is_silent", "error_code"}
    assert bool(reply.finish.speculation.num_failed_drafts) == bool(is_failure)
    assert reply.finish.speculation.num_failed_drafts <= 4
    await cluster.until_idle()


@pytest.mark.parametrize("is_auto", [False, True])
async def test_drafts_begin_when_a_long_prompt_is_computed_without_blocking_the_round(
    make_cluster: MakeCluster, is_auto: bool
) -> None:
    cluster = await make_cluster(draft_timeout_s=0.5, first_draft_timeout_s=0.6, step_s=0.02)
    drafter = cluster.drafters[0]
    drafter.prefill_rows, drafter.step_s = 2, 0.02  # 200 ids: 99 steps, two seconds
    prompt = [1 + i % 5 for i in range(200)]
    options = OPTIONS | {"prompt_ids": prompt, "max_new_tokens": 200}
    if is_auto:
        del options["num_draft_tokens"]
    reply = await cluster.generate(**options)
    assert reply.ids == cluster.target_ids(200, prompt)
    origins = [token.origin for token in reply.tokens]
    assert origins[:20] == [TOKEN_ORIGIN_PLAIN] * 20 and TOKEN_ORIGIN_ACCEPTED in origins
    assert reply.finish.speculation.num_failed_drafts == 1
    assert sum(list(entry.prompt_ids) == prompt for entry in drafter.opened) == 1, "computed once"
    assert cluster.router.draft.workers[0].is_ready
    await cluster.until_idle()


async def test_a_draft_that_waits_for_its_prompt_in_mid_answer_is_waited_for_in_plain_steps(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster(draft_timeout_s=0.3, step_s=0.01, drafter="model")
    drafter = cluster.drafters[0]

    async def lose_pages() -> None:
        """Its KV went to others: the prompt is computed again, for a second."""
        drafter.prefill_rows, drafter.step_s = 1, 0.01
        for link in drafter.links:
            for sequence in link.sequences.values():
                sequence.num_missing_kv = 100

    reply = await generate_and(cluster, 400, 10, lose_pages)
    assert reply.ids == cluster.target_ids(400, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 1
    assert sum(list(entry.prompt_ids) == PROMPT for entry in drafter.opened) == 1, "not begun anew"
    assert TOKEN_ORIGIN_ACCEPTED in [token.origin for token in reply.tokens[-20:]]
    await cluster.until_idle()


async def test_a_late_drafter_that_never_comes_or_dies_costs_its_drafts_only(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=0.1, first_draft_timeout_s=0.3, step_s=0.01, drafter="model")
    drafter = cluster.drafters[0]
    drafter.prefill_rows, drafter.step_s = 1, 0.01
    prompt = [1 + i % 5 for i in range(200)]

    async def hang() -> None:
        drafter.is_hanging = True

    reply = await generate_and(cluster, 100, 10, hang, prompt_ids=prompt)
    assert reply.ids == cluster.target_ids(100, prompt)
    assert reply.finish.speculation.num_failed_drafts == 1
    drafter.is_hanging = False
    reply = await generate_and(cluster, 100, 10, drafter.kill, prompt_ids=prompt)
    assert reply.ids == cluster.target_ids(100, prompt)
    assert reply.finish.speculation.num_failed_drafts == 2
    await cluster.until_idle()


async def test_the_circuit_of_a_hanging_drafter_opens_and_a_probe_closes_it(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=0.05, first_draft_timeout_s=0.05)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.is_silent = True
    reply = await cluster.generate(**OPTIONS, max_new_tokens=60)
    assert reply.ids == cluster.target_ids(60, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 1
    assert not worker.is_ready
    quick = await cluster.generate(**OPTIONS, max_new_tokens=60)
    assert quick.finish.speculation.num_failed_drafts == 0
    drafter.faults.is_silent = False
    await cluster.until(lambda: worker.is_ready)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=60)
    assert reply.finish.speculation.num_accepted_tokens > 0
    await cluster.until_idle()


async def test_a_drafter_that_was_replaced_is_probed_at_once(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=0.05, first_draft_timeout_s=0.05, min_probe_pause_s=60.0)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.is_silent = True
    await cluster.generate(**OPTIONS, max_new_tokens=60)
    await cluster.until(lambda: not worker.is_ready)  # the pause has begun
    await drafter.kill()
    await cluster.until(lambda: not worker.link.is_up)
    drafter.faults.is_silent = False
    await drafter.start()
    await cluster.until(lambda: worker.is_ready)


async def test_a_drafter_killed_in_the_middle_and_back_again(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.001)
    drafter = cluster.drafters[0]
    restarted = []

    async def kill() -> None:
        cluster.verifiers[0].step_s = 0.02  # the answer is not over before
        await drafter.kill()
        restarted.append(asyncio.ensure_future(restart()))

    async def restart() -> None:
        await cluster.until(lambda: not cluster.router.draft.workers[0].link.is_up)
        await drafter.start()
        await cluster.until(lambda: bool(drafter.opened[-1].committed_ids))
        cluster.verifiers[0].step_s = 0.001

    reply = await generate_and(cluster, 600, 20, kill)
    await asyncio.gather(*restarted)
    assert reply.ids == cluster.target_ids(600, PROMPT)
    assert drafter.opened[-1].committed_ids, "re-opened with what was decided meanwhile"
    await cluster.until_idle()


async def test_sequences_that_were_quiet_while_a_drafter_was_replaced_do_not_count_against_the_new_one(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster()
    drafter, pool = cluster.drafters[0], cluster.router.draft
    sampling = resolve_sampling(
        SamplingParams(), SamplingParams(temperature=0.0), seed=1, prompt_length=3, max_context=83, vocab_size=100
    )
    generation = GenerationRequest("r", PROMPT, sampling, VERIFICATION_MODE_COUPLED, (), 83, drafter=DrafterChoice())
    speculators = [Speculator(generation, pool, cluster.model.vocab_size, DraftTimeouts(5.0, 5.0)) for _ in range(4)]

    async def drafts() -> list[bool]:
        return [bool((await each.draft((), 4, takes_trees=False)).ids) for each in speculators]

    assert await drafts() == [True] * 4
    await drafter.kill()
    await cluster.until(lambda: not pool.workers[0].link.is_up)
    await drafter.start()
    await cluster.until(lambda: pool.workers[0].is_ready)
    assert await drafts() == [False] * 4
    assert pool.workers[0].is_ready
    assert await drafts() == [True] * 4
    for each in speculators:
        each.close()
    await cluster.until_idle()


async def test_another_draft_worker_takes_over(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2)
    serving: list[int] = []

    async def kill() -> None:
        serving.append(next(i for i, worker in enumerate(cluster.drafters) if worker.num_open))
        await cluster.drafters[serving[0]].kill()

    reply = await generate_and(cluster, 80, 10, kill)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert cluster.drafters[1 - serving[0]].num_blocks > 5
    await cluster.until_idle()


async def test_a_draining_drafter_is_left_for_another(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2, step_s=0.001)
    reply, drained = await generate_while_one_drains(cluster, cluster.drafters)
    assert reply.finish.speculation.num_failed_drafts == 0
    other = next(worker for worker in cluster.drafters if worker is not drained)
    assert other.num_blocks > 20
    await cluster.until_idle()


async def test_a_draining_drafter_that_is_the_only_one_is_left_once_drafts_do_not_pay(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster(step_s=0.001, drafter="model")
    drafter = cluster.drafters[0]
    options = {name: value for name, value in OPTIONS.items() if name != "num_draft_tokens"}
    answer = asyncio.ensure_future(cluster.generate(**options, max_new_tokens=1500))
    await cluster.until(lambda: drafter.num_blocks > 5)
    await drafter.drain()
    await cluster.until(lambda: cluster.router.draft.workers[0].is_draining)
    num_blocks = drafter.num_blocks
    await cluster.until(lambda: drafter.num_blocks > num_blocks + 5)
    (policy,) = cluster.router.policies._policies.values()
    policy.level(0).is_on = False
    await cluster.until(lambda: not drafter.num_open)
    assert not answer.done()
    assert (await answer).ids == cluster.target_ids(1500, PROMPT)


async def test_settings_that_another_drafter_refuses_in_the_middle_end_no_answer(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2)

    async def kill() -> None:
        serving, other = sorted(cluster.drafters, key=lambda drafter: -drafter.num_open)
        other.faults.refuses_settings = True
        await serving.kill()

    reply = await generate_and(cluster, 80, 10, kill, drafter="ngram", drafter_settings={"max_ngram": "3"})
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 2
    await cluster.until_idle()


async def test_unrequested_drafts_are_not_kept(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.01)
    (drafter,), (verifier,), worker = cluster.drafters, cluster.verifiers, cluster.router.draft.workers[0]

    async def flood() -> None:
        verifier.is_hanging = True
        # The draft has come, the verification result has not.
        await cluster.until(lambda: any(held.blocks for link in verifier.links for held in link.sequences.values()))
        (sequence_id,) = drafter.links[0].sequences
        frame = DraftLinkResponse(blocks=[DraftedBlock(sequence_id=sequence_id, base_length=1)] * 5000)
        await drafter.links[0].context.write(frame)
        (session,) = worker._sessions.values()
        await cluster.until(lambda: bool(session._mailbox._items))
        assert len(session._mailbox._items) < 5000
        verifier.is_hanging = False
        verifier.work.set()

    reply = await generate_and(cluster, 80, 10, flood)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 1
    await cluster.until_idle()


@pytest.mark.parametrize("limit", ["max_context", "draft_context"])
@pytest.mark.parametrize(("context", "is_reported"), [(1024, True), (2048, False), (4096, False), (0, False)])
async def test_a_draft_model_with_a_shorter_context_is_reported_once_and_shown(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture, limit: str, context: int, is_reported: bool
) -> None:
    cluster = await make_cluster(draft_hellos=[{limit: context}])
    worker = cluster.router.draft.workers[0]
    await cluster.until(lambda: worker.is_ready)
    cluster.router.verify.changed()
    text = "drafts texts of up to 1024 tokens only; the target's context is 2048"
    reported = [record.getMessage() for record in caplog.records if "texts of up to" in record.getMessage()]
    assert reported == ([f"draft worker {worker.link.address} {text}"] if is_reported else [])


async def test_a_draft_worker_that_is_full_stays_in_use_for_others(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "_FULL_PAUSE_S", 60.0)
    cluster = await make_cluster()
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _ in range(5):
        reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
        assert reply.ids == cluster.target_ids(30, PROMPT)
    assert worker.is_ready
    assert len(drafter.requests) == 5 + 1  # one each, and the probe: no more for a request within the pause


async def test_a_draft_worker_that_is_full_when_it_is_met_is_in_use_once_it_has_room(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(wait_ready=False, min_probe_pause_s=60.0)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]  # from before the probe on
    await cluster.until(lambda: worker.is_ready)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    drafter.faults.error_code = 0
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.finish.speculation.num_accepted_tokens > 0
    await cluster.until_idle()


async def test_a_request_that_a_full_draft_worker_refused_drafts_there_once_it_has_room(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "_FULL_PAUSE_S", 0.05)
    cluster = await make_cluster(step_s=0.001)
    drafter = cluster.drafters[0]
    drafter.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

    async def make_room() -> None:
        drafter.faults.error_code = 0

    reply = await generate_and(cluster, 600, 20, make_room)
    assert reply.ids == cluster.target_ids(600, PROMPT)
    assert reply.finish.speculation.num_accepted_tokens > 0
    await cluster.until_idle()


async def test_a_request_that_a_full_draft_worker_refuses_drafts_on_another(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "_FULL_PAUSE_S", 60.0)
    cluster = await make_cluster(draft_hellos=[{}, {}])
    full, other = cluster.drafters
    full.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _ in range(3):
        reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
        assert reply.ids == cluster.target_ids(30, PROMPT)
        assert reply.finish.speculation.num_accepted_tokens > 0
    assert len(full.requests) == 3 + 1  # one each, and the probe
    assert len(other.requests) > 3 + 1


async def test_a_draft_worker_that_others_have_filled_is_not_asked(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{"max_sequences": 4}, {"max_sequences": 4}])
    full, other = cluster.drafters
    await cluster.until(lambda: full.requests and other.requests)  # the probes
    await full.links[0].context.write(DraftLinkResponse(load=Load(running=4)))
    worker = next(worker for worker in cluster.router.draft.workers if worker.link.address == full.address)
    await cluster.until(lambda: worker.link.load is not None and worker.link.load.running == 4)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    assert len(full.requests) == 1 and len(other.requests) > 1


async def test_a_draft_worker_may_translate_to_the_targets_tokenizer_only(make_cluster: MakeCluster) -> None:
    translation = {"is_by_token": True, "coverage": 0.95}
    hellos = [{"translation": translation}, {"translation": translation, "tokenizer_hash": "0" * 64}]
    cluster = await make_cluster(draft_hellos=hellos, wait_ready=False)
    translating, other = cluster.router.draft.workers
    await cluster.until(lambda: translating.is_ready and other.link.state == "refused")
    assert "tokenizers differ" in other.link.detail and "--target-tokenizer" in other.link.detail
