"""The public service: what one call of Generate holds while it runs, and what it sends."""

from __future__ import annotations

import time

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from betoken.common.errors import from_rpc_error
from betoken.router.responses import response_of
from betoken.router.round.events import PromptLogprobsPart
from betoken.router.text.tokenizer import Tokenizer
from betoken.v1 import generation_pb2 as pb
from betoken.v1.types_pb2 import (
    TokenLogprobs,
)
from tests.router.harness import CHAT_TEMPLATE, MakeCluster, byte_tokenizer_json, request, running_cluster


async def test_the_servicer_releases_the_bytes_of_a_request_with_its_first_message(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.01)
    call = cluster.stub.Generate(request(prompt_ids=[5] * 100, max_new_tokens=500, ignore_eos=True), timeout=30)
    assert (await call.read()).WhichOneof("event") == "start"
    assert (cluster.router.waiting_bytes.num_bytes, cluster.router.admission.num_running) == (0, 1)
    call.cancel()
    await cluster.until_idle()


async def test_the_servicer_names_the_answer_of_each_prompt_logprobs_message() -> None:
    part = PromptLogprobsPart(4, [TokenLogprobs(logprob=-0.5)])
    response = response_of(part, 2)
    assert (response.answer, response.prompt_logprobs.first_position) == (2, 4)
    assert [each.logprob for each in response.prompt_logprobs.logprobs] == [-0.5]


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


async def test_a_rendered_prompt_has_one_bos() -> None:
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
    assert (info.default_drafter, info.default_num_draft_tokens) == ("auto", 0)
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
