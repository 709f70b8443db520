"""The promise: the same tokens, whatever the drafter, its length, the neighbours; and an exact account of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc import fast_wake
from betoken.testing.fake_model import FakeModel
from betoken.v1 import generation_pb2 as pb
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
    VERIFICATION_MODE_COUPLED,
)
from tests.router.harness import CHAT_TEMPLATE, MakeCluster, byte_ids, byte_tokenizer_json, running_cluster

PROMPT = [9, 8, 7]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8, 16])
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
async def test_generated_tokens_are_the_targets_own(
    make_cluster: MakeCluster, num_draft_tokens: int, agreement: float
) -> None:
    cluster = await make_cluster(agreement=agreement)
    reply = await cluster.generate(
        prompt_ids=PROMPT, max_new_tokens=61, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )
    assert reply.ids == cluster.target_ids(61, PROMPT)
    assert reply.text == cluster.tokenizer.decode(reply.ids)
    assert reply.finish.reason == pb.FINISH_REASON_LENGTH
    await cluster.until_idle()


@pytest.mark.parametrize(("max_messages_per_s", "fewest", "most"), [(1, 1, 5), (1_000_000, 8, 61)])
async def test_answer_messages_beyond_their_rate_are_merged(
    make_cluster: MakeCluster, max_messages_per_s: int, fewest: int, most: int
) -> None:
    cluster = await make_cluster(max_messages_per_s=max_messages_per_s, step_s=0.005)
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=61, ignore_eos=True, num_draft_tokens=3)
    assert reply.ids == cluster.target_ids(61, PROMPT)
    assert reply.text == cluster.tokenizer.decode(reply.ids)
    assert fewest <= len(reply.messages) <= most


@pytest.mark.parametrize("num_new", [1, 2, 3, 15, 16, 17, 40])
async def test_decoding_by_grants_gives_the_targets_tokens(make_cluster: MakeCluster, num_new: int) -> None:
    cluster = await make_cluster(num_drafters=0)
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=num_new, ignore_eos=True)
    assert reply.ids == cluster.target_ids(num_new, PROMPT)
    assert {token.origin for token in reply.tokens} == {TOKEN_ORIGIN_PLAIN}
    assert reply.start.drafter == ""
    assert reply.finish.speculation.num_drafts == 0
    await cluster.until_idle()


async def test_cores_are_kept_awake_while_requests_run(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fast_wake, "DEVICE", tmp_path / "cpu_dma_latency")
    fast_wake.DEVICE.touch()
    cluster = await make_cluster(step_s=0.02)
    assert not fast_wake.DEVICE.read_bytes()
    answered = asyncio.create_task(cluster.generate(prompt_ids=PROMPT, max_new_tokens=20, ignore_eos=True))
    cancelled = asyncio.create_task(cluster.generate(prompt_ids=[5], max_new_tokens=80, ignore_eos=True))
    await cluster.until(lambda: cluster.router._fast_wake.num_held == 2)
    assert len(fast_wake.DEVICE.read_bytes()) == 4
    await answered
    await cluster.until(lambda: cluster.router._fast_wake.num_held == 1)
    cancelled.cancel()
    await cluster.until(lambda: cluster.router._fast_wake.num_held == 0)
    await cluster.until_idle()


async def test_off_asks_no_drafter(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    opened = len(cluster.drafters[0].opened)
    reply = await cluster.generate(max_new_tokens=20, ignore_eos=True, off=True)
    assert len(reply.ids) == 20
    assert len(cluster.drafters[0].opened) == opened


async def test_many_concurrent_streams_each_get_their_own_tokens(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, num_drafters=2)
    replies = await asyncio.gather(
        *(cluster.generate(prompt_ids=[i + 1, 2], max_new_tokens=30 + i, ignore_eos=True) for i in range(24))
    )
    for i, reply in enumerate(replies):
        assert reply.ids == cluster.target_ids(30 + i, [i + 1, 2])
    assert all(len(worker.opened) >= 8 for worker in cluster.verifiers), "placed on the least loaded"
    await cluster.until_idle()


async def test_seed_is_drawn_returned_and_repeats_the_answer(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    first = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=20, temperature=1.0, ignore_eos=True)
    seed = first.start.seed
    again = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=20, temperature=1.0, ignore_eos=True, seed=seed)
    other = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=20, temperature=1.0, ignore_eos=True)
    assert first.ids == again.ids == cluster.target_ids(20, PROMPT, seed=seed)
    assert other.start.seed != seed


async def test_the_first_message_reports_the_settings_of_the_answer(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    reply = await cluster.generate(prompt="the on", max_new_tokens=4, stop=["zzz"])
    assert list(reply.start.prompt_ids) == cluster.tokenizer.encode("the on")
    assert reply.start.model == "fake"
    assert reply.start.mode == VERIFICATION_MODE_COUPLED
    assert reply.start.drafter == "model"
    assert len(reply.start.request_id) == 16
    sampling = reply.start.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.0, 1.0, 4)
    assert sampling.HasField("min_new_tokens") and sampling.HasField("seed") and list(sampling.stop) == ["zzz"]
    opened = cluster.verifiers[0].opened[-1]
    assert opened.max_length == len(reply.start.prompt_ids) + 4
    assert 0 < opened.deadline_ms <= 61_000  # gRPC rounds deadlines up


async def test_eos_ends_the_answer_with_nothing_after_it(make_cluster: MakeCluster, tokenizer: Tokenizer) -> None:
    model = FakeModel(vocab_size=tokenizer.vocab_size, eos_period=12)
    cluster = await make_cluster(model=model, agreement=1.0)
    for i in range(12):
        expected = cluster.target_ids(200, [i + 3, 4])
        expected = expected[: expected.index(0) + 1]
        for options in ({"num_draft_tokens": 7}, {"off": True}):
            reply = await cluster.generate(prompt_ids=[i + 3, 4], max_new_tokens=200, **options)
            assert reply.ids == expected
            assert reply.finish.reason == pb.FINISH_REASON_STOP
            assert reply.finish.usage.output_tokens == len(expected)
    await cluster.until_idle()


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None])
async def test_an_eos_that_only_the_tokenizer_names_ends_a_chat_models_answers(
    template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="betoken")
    tokenizer = Tokenizer(byte_tokenizer_json(), {"eos_token": "<|im_end|>"}, template, "test")
    end_id = tokenizer.special_ids["<|im_end|>"]
    script = (*byte_ids(tokenizer, b"4."), end_id, *byte_ids(tokenizer, b"user: 3+3?"))
    model = FakeModel(vocab_size=tokenizer.vocab_size, script=script)
    async with running_cluster(tokenizer, model=model, num_verifiers=2) as cluster:
        reply = await cluster.generate(prompt="2+2?", max_new_tokens=60)
        whole = await cluster.generate(prompt="2+2?", max_new_tokens=60, ignore_eos=True)
        info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest())
        opened = [list(entry.eos_token_ids) for worker in cluster.verifiers for entry in worker.opened]
    said = [record.getMessage() for record in caplog.records if "eos_token" in record.getMessage()]
    if template is None:
        assert reply.ids == [*script, 0] and list(info.eos_token_ids) == [0] and not said
    else:
        assert (reply.text, reply.finish.reason, reply.ids) == ("4.", pb.FINISH_REASON_STOP, list(script[:3]))
        assert list(info.eos_token_ids) == [0, end_id] and opened == [[0, end_id]] * 2
        assert len(said) == 1 and said[0].endswith(f"id {end_id} ends answers too")
    assert whole.ids[: len(script)] == list(script)


async def test_min_new_tokens_and_stop_ids(make_cluster: MakeCluster, tokenizer: Tokenizer) -> None:
    model = FakeModel(vocab_size=tokenizer.vocab_size, eos_period=4)
    cluster = await make_cluster(model=model)
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=100, min_new_tokens=20)
    assert len(reply.ids) > 20 and 0 not in reply.ids[:-1] and reply.ids[-1] == 0
    plain = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=100, ignore_eos=True)
    stop_id = next(token_id for token_id in plain.ids[5:] if token_id)
    stopped = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=100, ignore_eos=True, stop_token_ids=[stop_id])
    assert stopped.ids == plain.ids[: plain.ids.index(stop_id) + 1]
    assert stopped.finish.reason == pb.FINISH_REASON_STOP
    await cluster.until_idle()


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("stop", ["wor", "é", "🙂!", "lo w"])
async def test_stop_strings_across_tokens_and_blocks(
    make_cluster: MakeCluster, tokenizer: Tokenizer, stop: str, num_draft_tokens: int
) -> None:
    text = "héllo world 🙂!?"
    script = tuple(byte_ids(tokenizer, text.encode()))
    cluster = await make_cluster(model=FakeModel(vocab_size=tokenizer.vocab_size, script=script), agreement=0.8)
    reply = await cluster.generate(max_new_tokens=60, stop=["never", stop], num_draft_tokens=num_draft_tokens)
    before = text[: text.index(stop)]
    assert reply.text == before
    assert len(reply.ids) == len((before + stop).encode()) == reply.finish.usage.output_tokens
    assert (reply.finish.reason, reply.finish.stop) == (pb.FINISH_REASON_STOP, stop)
    await cluster.until_idle()


async def test_a_special_token_is_a_stop_string_too(make_cluster: MakeCluster, tokenizer: Tokenizer) -> None:
    script = (*byte_ids(tokenizer, b"ab"), tokenizer.special_ids["<eos>"], *byte_ids(tokenizer, b"cd"))
    cluster = await make_cluster(model=FakeModel(vocab_size=tokenizer.vocab_size, script=script))
    for options in ({"num_draft_tokens": 4}, {"off": True}):
        reply = await cluster.generate(max_new_tokens=60, ignore_eos=True, stop=["<eos>"], **options)
        assert (reply.ids, reply.text) == (list(script[:3]), "ab")
        assert (reply.finish.reason, reply.finish.stop) == (pb.FINISH_REASON_STOP, "<eos>")
    await cluster.until_idle()


async def test_every_message_is_valid_text_and_accounts_for_its_characters(
    make_cluster: MakeCluster, tokenizer: Tokenizer
) -> None:
    text = "👩‍🚀日本語 the end"
    cluster = await make_cluster(
        model=FakeModel(vocab_size=tokenizer.vocab_size, script=tuple(byte_ids(tokenizer, text.encode())))
    )
    for options in ({"num_draft_tokens": 3}, {"off": True}, {"stop": ["endless"]}, {"stop": ["end!"], "off": True}):
        reply = await cluster.generate(max_new_tokens=100, **options)
        assert reply.text == text
        for message in reply.messages:
            assert "\ufffd" not in message.text
            assert message.tokens and sum(token.num_chars for token in message.tokens) == len(message.text)


async def test_provenance_and_statistics_add_up(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(agreement=0.6)
    reply = await cluster.generate(max_new_tokens=100, ignore_eos=True, num_draft_tokens=4, drafter="ngram")
    stats, origins = reply.finish.speculation, [token.origin for token in reply.tokens]
    assert stats.num_drafts > 0
    assert sum(stats.num_drafted_per_position) == stats.num_draft_tokens
    assert sum(stats.num_accepted_per_position) == stats.num_accepted_tokens
    assert list(stats.num_drafted_per_position)[0] == stats.num_drafts
    assert all(a <= b for a, b in zip(stats.num_accepted_per_position, stats.num_drafted_per_position, strict=True))
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_verify_forwards == 100
    assert origins.count(TOKEN_ORIGIN_ACCEPTED) == stats.num_accepted_tokens
    assert origins.count(TOKEN_ORIGIN_RECOVERED) + origins.count(TOKEN_ORIGIN_BONUS) == stats.num_drafts
    assert origins.count(TOKEN_ORIGIN_PLAIN) == stats.num_verify_forwards - stats.num_drafts
    for token in reply.tokens:
        is_accepted = token.origin == TOKEN_ORIGIN_ACCEPTED
        assert token.source == ("ngram" if is_accepted else "")
    assert stats.num_failed_drafts == stats.num_failovers == 0
    assert 0 < stats.router_overhead_p50_ns < stats.round_ns
    assert stats.num_rounds == stats.num_drafts
    assert stats.num_draft_forwards == stats.num_draft_tokens, "the number reported by the fake drafter"
    assert 0 < stats.first_draft_forward_ns < stats.draft_forward_ns
    assert reply.finish.duration_ns >= reply.finish.time_to_first_token_ns > 0


@pytest.mark.parametrize("mode", ["off", "chain", "tree"])
@pytest.mark.parametrize("end", ["stop string", "stop id", "length", "eos"])
async def test_nothing_beyond_an_answers_end_is_counted(
    make_cluster: MakeCluster, tokenizer: Tokenizer, end: str, mode: str
) -> None:
    text = byte_ids(tokenizer, b"hello world and more")
    options: dict[str, Any] = {
        "stop string": {"stop": ["lo w"]},
        "stop id": {"stop_token_ids": [text[6]]},
        "length": {"max_new_tokens": 7},
        "eos": {"ignore_eos": False},
    }[end]
    script = (*text[:9], 0, *text) if end == "eos" else tuple(text)
    cluster = await make_cluster(
        model=FakeModel(vocab_size=tokenizer.vocab_size, script=script),
        agreement=1.0,
        verify_hellos=[{"supports_trees": mode == "tree"}],
    )
    cluster.drafters[0].makes_trees = mode == "tree"
    speculation = {"off": True} if mode == "off" else {"num_draft_tokens": 16}
    reply = await cluster.generate(**({"max_new_tokens": 60} | options | speculation))
    stats, origins = reply.finish.speculation, [token.origin for token in reply.tokens]
    assert len(reply.ids) == reply.finish.usage.output_tokens == stats.num_emitted_tokens < 12
    assert origins.count(TOKEN_ORIGIN_ACCEPTED) == stats.num_accepted_tokens
    assert sum(stats.num_accepted_per_position) == stats.num_accepted_tokens
    assert stats.num_draft_tokens >= sum(stats.num_drafted_per_position) >= stats.num_accepted_tokens
    assert stats.num_verify_forwards < 4 or mode == "off"
    await cluster.until_idle()


async def test_rounds_whose_draft_was_empty_count_as_rounds(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    cluster.drafters[0].faults.is_empty = True
    stats = (await cluster.generate(max_new_tokens=20, ignore_eos=True, num_draft_tokens=4)).finish.speculation
    # The first token comes from such a round too; the last one needs no draft.
    assert (stats.num_drafts, stats.num_rounds, stats.num_verify_forwards) == (0, 19, 20)
    assert 0 < stats.first_draft_forward_ns < stats.draft_forward_ns < stats.round_ns


async def test_sources_name_the_drafter(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(agreement=1.0)
    reply = await cluster.generate(max_new_tokens=12, ignore_eos=True)
    assert {token.source for token in reply.tokens if token.origin == TOKEN_ORIGIN_ACCEPTED} == {"model"}


async def test_logprobs_come_with_every_token_when_asked_for(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    for options in ({}, {"off": True}):
        reply = await cluster.generate(max_new_tokens=20, ignore_eos=True, logprobs=1, **options)
        assert [list(token.logprobs.top_ids) for token in reply.tokens] == [[token_id] for token_id in reply.ids]
    reply = await cluster.generate(max_new_tokens=5)
    assert not any(token.HasField("logprobs") for token in reply.tokens)


@pytest.mark.parametrize("cut", [1, 5, 13, 29, 30])
async def test_resume_continues_identically(make_cluster: MakeCluster, cut: int) -> None:
    cluster = await make_cluster()
    options = {"prompt_ids": PROMPT, "max_new_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 77}
    whole = await cluster.generate(**options)
    fingerprint = whole.start.system_fingerprint
    resumed = await cluster.generate(**options, resume_ids=whole.ids[:cut], system_fingerprint=fingerprint)
    assert resumed.ids == whole.ids[cut:]
    assert resumed.finish.usage.output_tokens == 30
    received = ""
    for message in whole.messages:  # what a client had when its stream broke after `cut` tokens
        if len(message.tokens) and cut > 0:
            cut -= len(message.tokens)
            received += message.text
    if cut == 0:
        assert received + resumed.text == whole.text
    await cluster.until_idle()


async def test_resume_of_a_finished_answer_finishes_at_once(make_cluster: MakeCluster, tokenizer: Tokenizer) -> None:
    script = tuple(byte_ids(tokenizer, b"one STOP two"))
    cluster = await make_cluster(model=FakeModel(vocab_size=tokenizer.vocab_size, script=script))
    options = {"max_new_tokens": 60, "stop": ["STOP"], "temperature": 0.0}
    whole = await cluster.generate(**options)
    opened = len(cluster.verifiers[0].opened)
    resumed = await cluster.generate(**options, resume_ids=whole.ids)
    assert (resumed.ids, resumed.text, resumed.finish.stop) == ([], "", "STOP")
    assert len(cluster.verifiers[0].opened) == opened


async def test_a_default_drafter_without_a_host_is_logged_and_not_used(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await make_cluster(drafter="typo")
    (warning,) = [record.message for record in caplog.records if record.name == "betoken.router.workers.fleet_log"]
    assert "--drafter typo" in warning and "they host model, ngram" in warning
    reply = await cluster.generate(max_new_tokens=20, ignore_eos=True)
    assert (reply.start.drafter, reply.finish.speculation.num_drafts) == ("", 0)
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert info.default_drafter == "" and list(info.drafters) == ["model", "ngram"]
    with pytest.raises(grpc.aio.AioRpcError, match="typo, is hosted nowhere"):
        await cluster.generate(drafter_settings={"max_ngram": "3"}, max_new_tokens=20)
    assert (await cluster.generate(drafter="ngram", max_new_tokens=20)).finish.speculation.num_drafts > 0


async def test_a_default_drafter_is_used_once_a_worker_hosts_it(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(drafter="late", draft_hellos=[{}, {"drafters": ["late"]}])
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert info.default_drafter == "late"
    reply = await cluster.generate(max_new_tokens=20, ignore_eos=True)
    assert reply.start.drafter == "late" and reply.finish.speculation.num_drafts > 0
    assert "late" in {entry.drafter.name for entry in cluster.drafters[1].opened}


@pytest.mark.parametrize("off", [False, True])
async def test_rounds_report_their_times_where_they_are_asked_for(make_cluster: MakeCluster, off: bool) -> None:
    cluster = await make_cluster(step_s=0.002)
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=30, report_rounds=True, off=off)
    rounds = [times for message in reply.messages for times in message.rounds]
    stats = reply.finish.speculation
    assert [sum(times.num_tokens for times in message.rounds) for message in reply.messages] == [
        len(message.tokens) for message in reply.messages
    ]
    assert len(rounds) == stats.num_verify_forwards
    for field in ("num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(times, field) for times in rounds) == getattr(stats, field)
    assert sum(times.verify_forward_ns for times in rounds) == stats.verify_forward_ns
    assert [times.begin_ns for times in rounds] == sorted(times.begin_ns for times in rounds)
    for times, later in zip(rounds, rounds[1:], strict=False):
        assert times.begin_ns + times.duration_ns <= later.begin_ns
        assert off or times.duration_ns >= times.draft_forward_ns + times.verify_forward_ns
    assert (sum(times.num_draft_tokens for times in rounds) == 0) is off
    silent = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=30, off=off)
    assert silent.ids == reply.ids and not any(message.rounds for message in silent.messages)
