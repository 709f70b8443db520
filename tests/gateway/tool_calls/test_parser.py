"""Reasoning, calls and content of answers in all formats, split anywhere."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from betoken.common.tool_formats import MARKS, SIGNATURES
from betoken.gateway.tool_calls.formats import FORMATS
from betoken.gateway.tool_calls.parser import ToolCallParser
from betoken.gateway.tool_calls.parts import Arguments, Call, Content, Part, Reasoning
from tests.gateway.tool_calls.answers import ANSWERS, HERMES_WEATHER, TOOLS


def read(form: str, text: str, cuts: list[int], **options: str) -> list[Part]:
    parser, parts = ToolCallParser(form, TOOLS if form else None, **options), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += parser.feed(text[start:end])
    return merged(parts + parser.end())


def merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind put together."""
    whole: list[Part] = []
    for part in parts:
        if whole and type(part) is type(whole[-1]) and not isinstance(part, Call):
            whole[-1] = type(part)(whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS, ids=[f"{form}: {text[:30]}" for form, text, _ in ANSWERS])
def test_an_answers_parts_do_not_depend_on_how_it_is_split(form: str, text: str, parts: list[Any]) -> None:
    parts = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    assert read(form, text, []) == parts
    assert read(form, text, list(range(1, len(text)))) == parts
    for cut in range(len(text) + 1):
        assert read(form, text, [cut]) == parts
    chance = random.Random(text)
    for _ in range(50):
        assert read(form, text, sorted(chance.sample(range(len(text) + 1), 2))) == parts


def test_every_format_of_a_template_has_a_parser_and_an_answer() -> None:
    assert {signature.name for signature in SIGNATURES} == set(FORMATS) == {form for form, _, _ in ANSWERS if form}


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    text = "hm\n</think>\n\nhello"
    assert read("", text, [3, 7], reasoning_end="</think>") == [Reasoning("hm"), Content("hello")]


def test_without_tools_calls_are_content() -> None:
    parser = ToolCallParser()
    assert merged(parser.feed(HERMES_WEATHER) + parser.end()) == [Content(HERMES_WEATHER)]


MARKED = [*sorted(MARKS), "<function=", "</function>", "<parameter=", "</parameter>", "functions.", "call:"]
PIECES = st.sampled_from(
    [
        *MARKED,
        '{"name": "weather", "arguments": {}}',
        "{",
        "}",
        "a",
        " ",
        "\n",
        "[",
        "]",
        "weather",
        '"',
        "\\",
        ":",
        ",",
        "(",
    ]
)


@pytest.mark.parametrize("form", FORMATS)
@given(pieces=st.lists(PIECES, max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_text_has_the_same_parts_however_it_is_split(form: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = read(form, text, [])
    assert read(form, text, cuts) == parts
    for part, following in zip(parts, [*parts, None][1:], strict=True):
        assert not isinstance(part, Call) or (isinstance(following, Arguments) and following.text.startswith("{"))


def test_a_calls_name_is_sent_at_once_and_its_arguments_as_they_arrive() -> None:
    parser = ToolCallParser("hermes", TOOLS)
    assert parser.feed('<tool_call>\n{"name": "weather", "arguments": ') == []
    assert parser.feed('{"ci') == [Call("weather"), Arguments('{"ci')]
    assert parser.feed('ty": "Be') == [Arguments('ty": "Be')]
    assert parser.feed('rn"}}\n</tool_') == [Arguments('rn"}')]
    assert parser.feed("call>") == [] and parser.end() == []


FILLS = [
    " ",
    "\n",
    "a",
    "1",
    "[",
    "{",
    '"',
    "<",
    "[AA",
    '{"a":',
    '"a",',
    "\\",
    "(",
    "<tool_call>{",
    "functools[",
    "```",
    "]}",
]


def cost(form: str, start: str, fill: str, num: int) -> int:
    """Lines of the parser's code that one answer executes, fed character by character; unread text stays short."""
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        return count

    parser = ToolCallParser(form, TOOLS)
    text = start + (fill * num)[:num]
    previous = sys.gettrace()
    sys.settrace(count)
    try:
        for character in text:
            parser.feed(character)
            assert parser.num_unread < 48, "each wait searches the unread text"
        parser.end()
    finally:
        sys.settrace(previous)
    return steps


@pytest.mark.parametrize("form", FORMATS)
def test_twice_the_text_costs_at_most_twice_the_steps_in_every_state(form: str) -> None:
    answer = max((text for name, text, _ in ANSWERS if name == form), key=len)
    for end in range(0, len(answer), 11):
        fill = FILLS[end // 11 % len(FILLS)]
        single, double = (cost(form, answer[:end], fill, num) for num in (300, 600))
        assert double < 2.3 * single, (answer[:end], fill)
