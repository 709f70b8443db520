"""OpenAI's own Python client, blocking and asyncio, whole and in streams, against a real router."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from betoken.testing.fake_model import FakeModel
from tests.gateway.conftest import Gate, MakeGate

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the"}]

TOLD: Any = {"betoken": {"provenance": True}}


async def test_a_chat_whole_is_the_chat_in_a_stream(gate: Gate) -> None:
    options: Any = {"model": "fake", "messages": CHAT, "max_tokens": 40, "seed": 9, "temperature": 0.8}
    whole = await gate.openai.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    stream = await gate.openai.chat.completions.create(
        **options, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
    )
    events = [event async for event in stream]
    text = "".join(event.choices[0].delta.content or "" for event in events[:-1])
    logprobs = [entry for event in events[:-1] for entry in (event.choices[0].logprobs or Empty).content]
    assert whole.choices[0].message.content == text != ""
    assert whole.choices[0].logprobs.content == logprobs and len(logprobs) == 40
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events[:-1]][-2:] == [None, "length"]
    assert events[-1].usage == whole.usage and events[-1].choices == []
    assert whole.usage.completion_tokens == 40
    assert {event.id for event in events} == {events[0].id}


class Empty:
    content: tuple[()] = ()


async def test_logprobs_are_reported_by_the_tokens_bytes(gate: Gate, tokenizer: Any) -> None:
    whole = await gate.openai.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=32,
        logprobs=True,
        top_logprobs=1,
        extra_body={"betoken": {"provenance": True}},
    )
    choice = whole.choices[0]
    ids = [token["id"] for token in choice.model_extra["betoken"]["tokens"]]
    told = [bytes(entry.bytes) for entry in choice.logprobs.content]
    assert told == [tokenizer.token_bytes(token_id) for token_id in ids]
    assert any(entry.token == "\ufffd" for entry in choice.logprobs.content)  # half a character
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in choice.logprobs.content)


async def test_the_same_seed_gives_the_same_text_whatever_drafts(gate: Gate) -> None:
    async def said(seed: int, **betoken: Any) -> str:
        answer = await gate.openai.completions.create(
            model="fake", prompt="the", max_tokens=24, seed=seed, temperature=1.0, extra_body={"betoken": betoken}
        )
        return answer.choices[0].text

    assert await said(1) == await said(1) == await said(1, off=True) == await said(1, drafter="ngram")
    assert await said(1) != await said(2)


async def test_each_of_n_answers_can_be_had_alone_by_the_seed_that_it_reports(gate: Gate) -> None:
    options: Any = {"model": "fake", "messages": CHAT, "max_tokens": 16, "temperature": 0.9}
    several = await gate.openai.chat.completions.create(**options, n=3, seed=-5)
    seeds = [choice.model_extra["betoken"]["seed"] for choice in several.choices]
    assert len({choice.message.content for choice in several.choices}) == 3
    assert seeds[0] == 2**64 - 5 and all(seed < 2**53 for seed in seeds[1:])
    for choice, seed in zip(several.choices, seeds, strict=True):
        alone = await gate.openai.chat.completions.create(**options, seed=seed)
        assert alone.choices[0].message.content == choice.message.content
    assert several.usage.completion_tokens == 48
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens  # once


async def test_n_answers_in_a_stream_are_distinguished(gate: Gate) -> None:
    options: Any = {"model": "fake", "messages": CHAT, "max_tokens": 16, "temperature": 0.9, "n": 3, "seed": 5}
    whole = await gate.openai.chat.completions.create(**options)
    texts = ["", "", ""]
    async for event in await gate.openai.chat.completions.create(**options, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


async def test_completions_take_texts_and_ids_one_or_several(gate: Gate, tokenizer: Any) -> None:
    texts = ["the", "on the é"]
    ids = [tokenizer.encode(text) for text in texts]
    options: Any = {"model": "fake", "max_tokens": 8, "seed": 3, "n": 2, "echo": True, "temperature": 1.0}
    answers = [await gate.openai.completions.create(prompt=prompt, **options) for prompt in (texts, ids)]
    said = [[choice.text for choice in answer.choices] for answer in answers]
    assert said[0] == said[1] and [choice.index for choice in answers[0].choices] == [0, 1, 2, 3]
    alone = [await gate.openai.completions.create(prompt=prompt, **options) for prompt in (texts[0], ids[1])]
    assert said[0] == [choice.text for answer in alone for choice in answer.choices]
    assert [text.startswith(texts[index // 2]) for index, text in enumerate(said[0])] == [True] * 4
    assert answers[0].usage.prompt_tokens == sum(len(prompt) for prompt in ids)
    stream = await gate.openai.completions.create(prompt=texts, stream=True, **options)
    streamed = ["", "", "", ""]
    async for event in stream:
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == said[0]


async def test_logprobs_of_completions_have_offsets_into_the_text(make_gate: MakeGate, tokenizer: Any) -> None:
    said = "on é 🙂 the"
    gate = await make_gate(model=FakeModel(tokenizer.vocab_size, script=tuple(tokenizer.encode(said))))
    answer = await gate.openai.completions.create(model="fake", prompt="the", max_tokens=24, logprobs=2)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert text == said and logprobs.tokens[-1] == "<eos>"
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.completion_tokens
    tokens, offsets = logprobs.tokens[:-1], logprobs.text_offset
    whole = [(token, offset) for token, offset in zip(tokens, offsets, strict=False) if "bytes:" not in token]
    assert len(whole) == 4 and all(text.startswith(token, offset) for token, offset in whole)
    assert tokens[2:4] == ["bytes:\\xc3", "bytes:\\xa9"] and offsets[2:5] == [3, 3, 4]
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


async def test_stop_strings_end_the_answer_before_them(gate: Gate) -> None:
    whole = (await gate.openai.completions.create(model="fake", prompt="the", max_tokens=24)).choices[0].text
    stop = whole[5:7]
    answer = await gate.openai.completions.create(model="fake", prompt="the", max_tokens=24, stop=["zzzz", stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["betoken"]["stop"] == stop


async def test_sampling_reaches_the_router_under_its_names(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(gate.cluster.verifiers[0], "check_open", opened.append)
    await gate.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"7": -2},
        stop="x",
        user="somebody",
        extra_body={"top_k": 9, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [4]}
        | {"ignore_eos": True, "betoken": {"num_draft_tokens": 2}},
    )
    sampling = opened[-1].sampling
    floats = {"temperature": 0.5, "presence_penalty": 0.25, "frequency_penalty": -0.5, "min_p": 0.125}
    assert {name: getattr(sampling, name) for name in floats} == floats
    assert (sampling.top_k, sampling.repetition_penalty, sampling.min_new_tokens) == (9, 1.5, 2)
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(7, -2.0)]


def ask_blocking(url: str) -> tuple[str, str, Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        whole = client.completions.create(model="fake", prompt="the", max_tokens=12).choices[0].text
        stream = client.completions.create(model="fake", prompt="the", max_tokens=12, stream=True)
        return whole, "".join(event.choices[0].text for event in stream), client.models.list().data[0]


async def test_the_blocking_openai_client_gets_the_same_answers(gate: Gate) -> None:
    whole, streamed, model = await asyncio.to_thread(ask_blocking, gate.url)
    assert whole == streamed != ""
    assert (model.id, model.object, model.model_extra["max_model_len"]) == ("fake", "model", 2048)
    assert (await gate.openai.models.retrieve("fake")).id == "fake"


async def test_errors_reach_the_openai_client_as_its_own_types(gate: Gate) -> None:
    with pytest.raises(openai.BadRequestError, match="0 to 100") as caught:
        await gate.openai.completions.create(model="fake", prompt="the", temperature=101)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="other") as missing:
        await gate.openai.completions.create(model="other", prompt="the")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="top_p") as streamed:  # a refusal has its status in a stream, too
        await gate.openai.completions.create(model="fake", prompt="the", top_p=2, stream=True)
    assert streamed.value.param == "top_p"


async def test_rounds_report_their_times_in_a_stream(gate: Gate) -> None:
    told: list[dict[str, Any]] = []
    stream = await gate.openai.completions.create(
        model="fake", prompt="the", max_tokens=24, stream=True, extra_body={"betoken": {"rounds": True}}
    )
    async for event in stream:
        told += (event.choices[0].model_extra.get("betoken") or {}).get("rounds", [])
    assert sum(times["num_tokens"] for times in told) == 24
    assert all(times["duration_s"] >= times["verify_forward_s"] > 0 for times in told)


@pytest.mark.parametrize("content", ["text", "parts"])
async def test_a_prediction_is_drafted_from_and_counted(make_gate: MakeGate, tokenizer: Any, content: str) -> None:
    text = "The expected text is said unchanged."
    model = FakeModel(vocab_size=tokenizer.vocab_size, script=tuple(tokenizer.encode(text, add_special_tokens=False)))
    gate = await make_gate(model=model, draft_hellos=[{"predicting_drafters": ["ngram"]}])
    options: Any = {"model": "fake", "messages": CHAT, "temperature": 0}
    predicted = text if content == "text" else [{"type": "text", "text": part} for part in (text[:9], text[9:])]
    prediction: Any = {"type": "content", "content": predicted}
    answer = await gate.openai.chat.completions.create(**options, prediction=prediction, extra_body=TOLD)
    choice, details = answer.choices[0], answer.usage.completion_tokens_details
    assert choice.message.content == text
    sources = [token["source"] for token in choice.model_extra["betoken"]["tokens"]]
    assert details.accepted_prediction_tokens == sources.count("prediction") > 10
    assert details.rejected_prediction_tokens == 0
    stream = await gate.openai.chat.completions.create(
        **options, prediction=prediction, stream=True, stream_options={"include_usage": True}
    )
    events = [event async for event in stream]
    assert events[-1].usage.completion_tokens_details == details
    for content in ("", [], [{"type": "text", "text": ""}]):
        empty = await gate.openai.chat.completions.create(
            **options, prediction={"type": "content", "content": content}, extra_body=TOLD
        )
        assert empty.choices[0].message.content == answer.choices[0].message.content
