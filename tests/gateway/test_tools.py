"""Tools through the template and back, and thoughts, as OpenAI's client sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from betoken.router.text.tokenizer import Tokenizer
from betoken.testing.fake_model import FakeModel
from tests.gateway.conftest import Gate, MakeGate
from tests.gateway.tools import ARGUMENTS, OPEN_WEATHER, SPECIAL, TEMPLATES, WRITTEN
from tests.router.harness import byte_tokenizer_json

CHAT: list[Any] = [{"role": "user", "content": "How is it in Bern?"}]


@pytest.fixture(scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Tokenizer whose template has the format in `request.param`."""
    config = {"eos_token": "<eos>", "additional_special_tokens": SPECIAL}
    return Tokenizer(byte_tokenizer_json(), config, TEMPLATES[getattr(request, "param", "hermes")], "test")


async def saying(make_gate: MakeGate, tokenizer: Tokenizer, text: str) -> Gate:
    return await make_gate(model=FakeModel(tokenizer.vocab_size, script=tuple(tokenizer.encode(text))))


@pytest.mark.parametrize(("style", "tokenizer"), [(style, style) for style in WRITTEN], indirect=["tokenizer"])
async def test_tool_calls_are_parsed_from_whole_answers_and_streams(
    make_gate: MakeGate, tokenizer: Tokenizer, style: str
) -> None:
    gate = await saying(make_gate, tokenizer, WRITTEN[style])
    options: Any = {"model": "fake", "messages": CHAT, "tools": [OPEN_WEATHER]}
    whole = (await gate.openai.chat.completions.create(**options)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I ask."
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    assert len(call.id) == 9 and call.id.isalnum()
    calls, text, reasons = [], "", []
    async for event in await gate.openai.chat.completions.create(**options, stream=True):
        (choice,) = event.choices
        calls += choice.delta.tool_calls or []
        text += choice.delta.content or ""
        reasons.append(choice.finish_reason)
    assert text == "I ask." and reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert (calls[0].index, calls[0].function.name, len(calls[0].id)) == (0, "weather", 9), "the name comes first"
    assert "".join(one.function.arguments for one in calls) == ARGUMENTS and len(calls) > 1
    assert not any(one.function.name or one.id or one.index for one in calls[1:])


async def test_tool_calls_and_their_results_reach_the_template(
    make_gate: MakeGate, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = await saying(make_gate, tokenizer, "Fine.")
    opened: list[Any] = []
    monkeypatch.setattr(gate.cluster.verifiers[0], "check_open", opened.append)
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages: Any = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "sunny"},
    ]
    answer = await gate.openai.chat.completions.create(model="fake", messages=messages, tools=[OPEN_WEATHER])
    assert answer.choices[0].message.content == "Fine." and answer.choices[0].finish_reason == "stop"
    text = tokenizer.decode(opened[-1].prompt_ids)
    assert text.startswith(json.dumps(OPEN_WEATHER) + "\n<user>How")
    assert f'<assistant>{{"name": "weather", "arguments": {ARGUMENTS}}}<tool>sunny' in text


HELD = ["?\nEND", "? [TOOL_CALLS]x", "ask?x", "?[{x"]


@pytest.mark.parametrize("tokenizer", ["mistral"], indirect=True)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("stop", HELD)
async def test_a_stop_string_that_may_have_begun_moves_no_text_behind_a_tool_calls_mark(
    make_gate: MakeGate, tokenizer: Tokenizer, stop: str, is_stream: bool
) -> None:
    text = f'I ask? [TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'
    gate = await saying(make_gate, tokenizer, text if " " in stop else text.replace("? ", "?"))
    options: Any = {"model": "fake", "messages": CHAT, "tools": [OPEN_WEATHER], "stop": [stop]}
    if not is_stream:
        message = (await gate.openai.chat.completions.create(**options)).choices[0].message
        assert (message.content, len(message.tool_calls)) == ("I ask?", 1)
        return
    events = [event async for event in await gate.openai.chat.completions.create(**options, stream=True)]
    assert "".join(event.choices[0].delta.content or "" for event in events) == "I ask?"
    assert events[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("tokenizer", ["mistral"], indirect=True)
async def test_half_a_character_before_a_tool_calls_mark_keeps_the_call(
    make_gate: MakeGate, tokenizer: Tokenizer
) -> None:
    call = f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'
    script = (*tokenizer.encode("é")[:1], *tokenizer.encode(call))
    gate = await make_gate(model=FakeModel(tokenizer.vocab_size, script=script))
    options: Any = {"model": "fake", "messages": CHAT, "tools": [OPEN_WEATHER]}
    message = (await gate.openai.chat.completions.create(**options)).choices[0].message
    assert (message.content, len(message.tool_calls)) == ("\ufffd", 1)


async def test_line_separators_of_an_answer_are_escaped_in_its_events(
    make_gate: MakeGate, tokenizer: Tokenizer
) -> None:
    said = "a\u2028b\u2029c\x85d"
    gate = await saying(make_gate, tokenizer, said)
    asked = {"messages": CHAT, "stream": True}
    lines = (await gate.post("/v1/chat/completions", asked)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == said


async def test_without_tools_no_text_is_parsed_as_a_tool_call(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    gate = await saying(make_gate, tokenizer, WRITTEN["hermes"])
    for options in ({}, {"tools": [OPEN_WEATHER], "tool_choice": "none"}):
        asked: Any = {"model": "fake", "messages": CHAT, **options}
        answer = await gate.openai.chat.completions.create(**asked)
        assert answer.choices[0].message.content == WRITTEN["hermes"]
        assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(("said", "thinks"), [("<think>\nhm\n</think>\n\nyes", False), ("hm\n</think>\n\nyes", True)])
async def test_thoughts_are_separated_from_content(
    make_gate: MakeGate, tokenizer: Tokenizer, said: str, thinks: bool
) -> None:
    gate = await saying(make_gate, tokenizer, said)
    kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
    options: Any = {"model": "fake", "messages": CHAT, "extra_body": kwargs}
    whole = await gate.openai.chat.completions.create(**options)
    message = whole.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("yes", "hm")
    thought, content = "", ""
    async for event in await gate.openai.chat.completions.create(**options, stream=True):
        delta = event.choices[0].delta
        thought += (delta.model_extra or {}).get("reasoning_content") or ""
        content += delta.content or ""
    assert (thought, content) == ("hm", "yes")
    num_thought = len(tokenizer.encode(said.partition("</think>")[0].removeprefix("<think>")))
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens - num_thought <= len("</think>")


@pytest.mark.parametrize("tokenizer", [""], indirect=True)
async def test_unsupported_tool_fields_are_rejected_by_name(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    gate = await saying(make_gate, tokenizer, "x")
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    named = {"type": "function", "function": {"name": "weather"}}
    for field, param in (
        ({"tools": [OPEN_WEATHER], "tool_choice": "required"}, "tool_choice"),  # in no form that is known
        ({"tools": [OPEN_WEATHER], "tool_choice": named}, "tool_choice"),
        ({"tools": [OPEN_WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [strict]}, "tools"),
        ({"tools": [OPEN_WEATHER]}, "tools"),  # calls could not be distinguished from text
        ({"tools": [OPEN_WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [OPEN_WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [OPEN_WEATHER], "tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [OPEN_WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ):
        reply = await gate.post("/v1/chat/completions", {"messages": CHAT} | field)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("tokenizer", [""], indirect=True)
@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [OPEN_WEATHER], "tool_choice": "none"}])
async def test_a_chat_that_may_not_call_needs_no_known_tool_call_format(
    make_gate: MakeGate, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    gate = await saying(make_gate, tokenizer, "hello")
    reply = await gate.post("/v1/chat/completions", {"messages": CHAT} | fields)
    assert reply.json()["choices"][0]["message"]["content"] == "hello", reply.text


async def test_an_answer_continues_the_last_message(
    make_gate: MakeGate, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = await saying(make_gate, tokenizer, " and on")
    opened: list[Any] = []
    monkeypatch.setattr(gate.cluster.verifiers[0], "check_open", opened.append)
    messages = [*CHAT, {"role": "assistant", "content": "On"}]
    body = {"messages": messages, "continue_final_message": True}
    assert (await gate.post("/v1/chat/completions", body)).json()["choices"][0]["message"]["content"] == " and on"
    assert tokenizer.decode(opened[-1].prompt_ids).endswith("<assistant>On")
