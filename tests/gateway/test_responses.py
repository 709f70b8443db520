"""OpenAI's newer protocol, as its client sees it: text, thoughts and calls, whole and in events."""

from __future__ import annotations

from typing import Any

import pytest

from betoken.router.text.tokenizer import Tokenizer
from betoken.testing.fake_model import FakeModel
from tests.gateway.conftest import Gate, MakeGate
from tests.gateway.tools import ARGUMENTS, SPECIAL, TEMPLATES
from tests.router.harness import byte_tokenizer_json

SAID = (
    "<think>\nhm\n</think>\n\nI ask.\n<tool_call>\n" + f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
)
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    config = {"eos_token": "<eos>", "additional_special_tokens": SPECIAL}
    return Tokenizer(byte_tokenizer_json(), config, TEMPLATES["hermes"], "test")


async def saying(make_gate: MakeGate, tokenizer: Tokenizer, text: str) -> Gate:
    return await make_gate(model=FakeModel(tokenizer.vocab_size, script=tuple(tokenizer.encode(text))))


async def test_an_answer_has_its_thoughts_text_and_calls_as_items(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    gate = await saying(make_gate, tokenizer, SAID)
    asked: Any = {"model": "fake", "input": "How is it in Bern?", "tools": [TOOL], "instructions": "Be brief."}
    whole = await gate.openai.responses.create(**asked)
    assert (whole.status, whole.object, whole.output_text) == ("completed", "response", "I ask.")
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "hm"
    assert (whole.output[2].name, whole.output[2].arguments) == ("weather", ARGUMENTS)
    assert whole.usage.output_tokens == len(tokenizer.encode(SAID)) + 1 and whole.usage.input_tokens > 20
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens


async def test_events_of_responses_add_up_to_the_answer(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    gate = await saying(make_gate, tokenizer, SAID)
    asked: Any = {"model": "fake", "input": [{"role": "user", "content": "hi"}], "tools": [TOOL], "stream": True}
    events = [event async for event in await gate.openai.responses.create(**asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "I ask."
    texts = {"response.output_text": "", "response.reasoning_text": "", "response.function_call_arguments": ""}
    for event in events:
        kind, _, step = event.type.rpartition(".")
        if kind in texts and step == "delta":
            texts[kind] += event.delta
    assert list(texts.values()) == ["I ask.", "hm", ARGUMENTS]
    for step in ("added", "done"):
        items = [event.item for event in events if event.type == f"response.output_item.{step}"]
        assert [item.type for item in items] == ["reasoning", "message", "function_call"]
    assert items == last.response.output
    async with gate.openai.responses.stream(**{key: asked[key] for key in ("model", "input")}, tools=[TOOL]) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == "I ask."


async def test_a_conversation_is_sent_back_whole_to_responses(
    make_gate: MakeGate, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = await saying(make_gate, tokenizer, SAID)
    opened: list[Any] = []
    monkeypatch.setattr(gate.cluster.verifiers[0], "check_open", opened.append)
    turns: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How?"}]}]
    first = await gate.openai.responses.create(model="fake", input=turns, tools=[TOOL])
    turns += [item.model_dump(exclude_none=True) for item in first.output]
    turns += [{"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}]
    await gate.openai.responses.create(model="fake", input=turns, tools=[TOOL])
    text = tokenizer.decode(opened[-1].prompt_ids)
    assert text.endswith(f'<user>How?<assistant>I ask.{{"name": "weather", "arguments": {ARGUMENTS}}}<tool>sunny')


async def test_an_answer_that_is_cut_off_is_incomplete(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    gate = await saying(make_gate, tokenizer, "on the moon and on")
    asked: Any = {"model": "fake", "input": "hi", "max_output_tokens": 3}
    whole = await gate.openai.responses.create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await gate.openai.responses.create(**asked, stream=True)]
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text != ""


async def test_unsupported_fields_of_responses_are_rejected_by_name(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    gate = await saying(make_gate, tokenizer, "x")
    for field, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.json_object"),  # no verify worker here keeps one
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].name"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"n": 2}, "n"),
        ({"wishes": 1}, "wishes"),
    ):
        reply = await gate.post("/v1/responses", {"input": "hi"} | field)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    for item in ({"type": "image_generation_call"}, {"role": "user", "content": [{"type": "input_image"}]}, 3):
        reply = await gate.post("/v1/responses", {"input": [item]})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("input"), reply.text
    for neutral in ({"store": False}, {"metadata": {}}, {"include": []}, {"text": {"format": {"type": "text"}}}):
        assert (await gate.post("/v1/responses", {"input": "hi"} | neutral)).status_code == 200
