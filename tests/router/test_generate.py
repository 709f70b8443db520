"""The promise: the same tokens, whatever the drafter, its length, the neighbours; and an exact account of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from betoken.common.errors import from_rpc_error
from betoken.router.responses import finish_of
from betoken.router.round.events import Finished
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.answer import FinishReason
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
async def test_tokens_are_the_targets_own(make_cluster: MakeCluster, num_draft_tokens: int, agreement: float) -> None:
    cluster = await make_cluster(agreement=agreement)
    reply = await cluster.generate(
        prompt_ids=PROMPT, max_new_tokens=61, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )
    assert reply.ids == cluster.target_ids(61, PROMPT)
    assert reply.text == cluster.tokenizer.decode(reply.ids)
    assert reply.finish.reason == pb.FINISH_REASON_LENGTH
    await cluster.until_idle()


@pytest.mark.parametrize(("max_messages_per_s", "fewest", "most"), [(1, 1, 5), (1_000_000, 8, 61)])
async def test_messages_beyond_their_rate_are_merged(
    make_cluster: MakeCluster, max_messages_per_s: int, fewest: int, most: int
) -> None:
    cluster = await make_cluster(max_messages_per_s=max_messages_per_s, step_s=0.005)
    reply = await cluster.generate(prompt_ids=PROMPT, max_new_tokens=61, ignore_eos=True, num_draft_tokens=3)
    assert reply.ids == cluster.target_ids(61, PROMPT)
    assert reply.text == cluster.tokenizer.decode(reply.ids)
    assert fewest <= len(reply.messages) <= most


@pytest.mark.parametrize("num_new", [1, 2, 3, 15, 16, 17, 40])
async def test_plain_decoding_by_grants_gives_the_same(make_cluster: MakeCluster, num_new: int) -> None:
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


async def test_many_streams_at_once_each_get_their_own(make_cluster: MakeCluster) -> None:
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


async def test_the_first_message_says_what_is_in_force(make_cluster: MakeCluster) -> None:
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


def test_every_count_leaves_under_its_own_name() -> None:
    counts, names = SpeculationCounts(), pb.SpeculationStats.DESCRIPTOR.fields_by_name.keys()
    counts.add_round(round_ns=1000, draft_queue_ns=1, draft_forward_ns=1, verify_ns=1)  # overhead 997
    for number, name in enumerate(names):
        if name not in ("router_overhead_p50_ns", "num_failed_drafts", "num_failed_drafts_by_reason", "policy"):
            setattr(counts, name, [number] if name.endswith("_per_position") else number)
    counts.num_failed_drafts_by_reason.update(timeout=50, lost=51)
    counts.policy = pb.SpeculationPolicy(reason="on")
    finish = finish_of(Finished(FinishReason.LENGTH, "", 1, 2, 4, counts, 5, 6, 7))
    for name in names:
        assert getattr(finish.speculation, name) == getattr(counts, name), name
    assert finish.usage == pb.Usage(prompt_tokens=1, output_tokens=2, cached_prompt_tokens=4)
    assert (finish.queue_ns, finish.time_to_first_token_ns, finish.duration_ns) == (5, 6, 7)


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


async def test_chat_goes_through_the_models_template(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    reply = await cluster.generate(messages=[("user", "hi"), ("assistant", "yo"), ("user", "the")], max_new_tokens=3)
    assert cluster.tokenizer.decode(reply.start.prompt_ids) == "<user>hi\n<assistant>yo\n<user>the\n<assistant>"


async def test_a_chat_is_continued_and_its_names_of_tokens_are_text_where_asked(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    chat = pb.ChatMessages(continue_final_message=True, escape_special_tokens=True)
    chat.messages.add(role="user", content="hi<eos>")
    chat.messages.add(role="assistant", content="the on")
    request = pb.GenerateRequest(messages=chat)
    request.sampling.max_new_tokens = 3
    start = (await anext(aiter(cluster.stub.Generate(request)))).start
    assert cluster.tokenizer.decode(start.prompt_ids) == "<user>hi<eos>\n<assistant>the on"
    assert list((await cluster.stub.Tokenize(pb.TokenizeRequest(messages=chat))).ids) == list(start.prompt_ids)
    chat.ClearField("escape_special_tokens")
    assert 0 in (await cluster.stub.Tokenize(pb.TokenizeRequest(messages=chat))).ids


async def test_a_text_that_is_rendered_already_has_one_bos() -> None:
    fast = FastTokenizer.from_str(byte_tokenizer_json())
    fast.post_processor = processors.TemplateProcessing("<eos> $0", special_tokens=[("<eos>", 0)])
    tokenizer = Tokenizer(fast.to_str(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")
    async with running_cluster(tokenizer) as cluster:
        for add, num_bos in ((None, 2), (True, 2), (False, 1)):
            options = {} if add is None else {"add_special_tokens": add}
            reply = await cluster.generate(prompt="<eos>hi", max_new_tokens=2, **options)
            assert list(reply.start.prompt_ids).count(0) == num_bos
            answer = await cluster.stub.Tokenize(pb.TokenizeRequest(prompt="<eos>hi", **options))
            assert list(answer.ids) == list(reply.start.prompt_ids)


async def test_an_empty_prompt_starts_from_bos_if_there_is_one(tokenizer: Tokenizer) -> None:
    with_bos = Tokenizer(byte_tokenizer_json(), {"bos_token": "<eos>"}, None, "test")
    async with running_cluster(with_bos) as cluster:
        assert list((await cluster.generate(prompt="", max_new_tokens=2)).start.prompt_ids) == [with_bos.bos_id]
        with pytest.raises(grpc.aio.AioRpcError, match="prompt = 0 tokens: must have a token unless BOS is added"):
            await cluster.generate(prompt="", max_new_tokens=2, add_special_tokens=False)
    async with running_cluster(tokenizer) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="prompt = 0 tokens: must have a token unless BOS is added"):
            await cluster.generate(prompt="", max_new_tokens=2)


async def test_model_info_and_tokenize(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2)
    await cluster.generate(max_new_tokens=3)
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert (info.model, info.vocab_size, info.max_context) == ("fake", cluster.model.vocab_size, 2048)
    assert list(info.drafters) == ["model", "ngram"]
    assert (info.default_drafter, info.default_num_draft_tokens) == ("model", 0)
    assert info.default_sampling.temperature == 0.0 and info.default_sampling.top_p == 1.0
    assert [worker.state for worker in info.verify_workers] == ["ready", "ready"]
    assert info.verify_workers[0].hello.worker_id and info.verify_workers[0].load.total_pages
    assert info.has_chat_template
    ids = (await cluster.stub.Tokenize(pb.TokenizeRequest(prompt="the on"), timeout=30)).ids
    assert list(ids) == cluster.tokenizer.encode("the on")
    chat = pb.TokenizeRequest()
    chat.messages.messages.add(role="user", content="x")
    ids = (await cluster.stub.Tokenize(chat, timeout=30)).ids
    assert cluster.tokenizer.decode(ids) == "<user>x\n<assistant>"


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


async def test_workers_that_answer_alike_serve_their_model_by_each_of_its_names(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"model_id": "/models/a"}, {"model_id": "/models/b"}])
    for name in ("/models/a", "/models/b"):
        assert (await cluster.generate(max_new_tokens=3, model=name)).start.model == name
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=3, model="/models/c")
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await cluster.generate(max_new_tokens=3)).start.model in ("/models/a", "/models/b")


async def test_a_model_that_is_served_no_more_has_no_name(make_cluster: MakeCluster) -> None:
    hellos = [{"model_id": "/models/a"}, {"model_id": "/models/b"}]
    cluster = await make_cluster(verify_hellos=hellos, allow_weights_change=True)
    old, new = cluster.verifiers
    for worker in (old, new):
        await worker.kill()
    links = [worker.link for worker in cluster.router.verify.workers]
    await cluster.until(lambda: not any(link.is_up for link in links))
    new.hello.weights_fingerprint = "b" * 64
    await new.start()
    await cluster.until(lambda: links[1].is_up)
    assert (await cluster.generate(max_new_tokens=3, model="/models/b")).ids
    with pytest.raises(grpc.aio.AioRpcError, match="'/models/a' is not served here"):
        await cluster.generate(max_new_tokens=3, model="/models/a")


class SlowTokenizer(Tokenizer):
    """Takes its time."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.05)
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_the_time_of_a_request_begins_with_its_text(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    cluster.router.tokenizer = SlowTokenizer(byte_tokenizer_json(), {}, CHAT_TEMPLATE, "test")
    finish = (await cluster.generate(prompt="the on", max_new_tokens=3, ignore_eos=True)).finish
    assert finish.duration_ns >= finish.time_to_first_token_ns >= 50e6


async def test_detokenize_gives_the_text_and_the_bytes_of_each_id(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    said = "the é"
    ids = (await cluster.stub.Tokenize(pb.TokenizeRequest(prompt=said))).ids
    answer = await cluster.stub.Detokenize(pb.DetokenizeRequest(ids=[*ids, 0]))
    assert answer.text == said  # 0 is EOS, which leaves no text
    assert b"".join(answer.pieces) == said.encode() + b"<eos>"
    long = await cluster.stub.Detokenize(pb.DetokenizeRequest(ids=list(ids) * 2000))
    assert long.text == said * 2000
    for wrong, field in (([], "ids"), ([1, 10**6], "ids[1]")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Detokenize(pb.DetokenizeRequest(ids=wrong))
        assert from_rpc_error(caught.value).field == field


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
