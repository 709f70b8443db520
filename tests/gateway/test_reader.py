"""Thoughts, calls and text of an answer, however its text is cut; what is no call stays text, whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from betoken.gateway.reader import MARKS, Arguments, Call, Part, Reader, Said, Thought

TOOLS = frozenset(("weather", "add"))
A, B = '{"city": "Bern"}', '{"a": 1, "b": [2, {"c": "}"}]}'

WEATHER: tuple[Part, ...] = (Call("weather"), Arguments(A))
ADD: tuple[Part, ...] = (Call("add"), Arguments(B))

CASES: list[tuple[str, list[Any]]] = [
    ("hello", [Said("hello")]),
    (" hello\n", [Said(" hello\n")]),
    ("<think>\nhm\n</think>\n\nhello", [Thought("hm"), Said("hello")]),
    ("<think></think>hello", [Said("hello")]),
    ("<think>\nhm", [Thought("hm")]),
    ("a <think> b", [Said("a <think> b")]),
    (f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>', [WEATHER]),
    (
        f'I ask.\n<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {B}}}\n</tool_call>',
        [Said("I ask."), WEATHER, ADD],
    ),
    (
        f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>',
        [Thought("hm"), WEATHER],
    ),
    (f'<tool_call>{{"name": "weather", "arguments": {A}}}', [WEATHER]),  # cut off before its end
    ('<tool_call>{"name": "weather", "arguments": {"city": "Be', [Call("weather"), Arguments('{"city": "Be')]),
    (f'<tool_call>{{"arguments": {A}, "name": "weather"}}</tool_call>', [WEATHER]),
    (f'<tool_call>{{"name": "weather", "arguments": {A}, "id": "}}"}}</tool_call> so', [WEATHER, Said("so")]),
    (
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {B}, "id": "a"}},{{"arguments": {A}, "name": "weather"}}]',
        [ADD, WEATHER],
    ),
    (
        f'[TOOL_CALLS][{{"arguments": {A}, "name": "weather"}}, {{"name": "add", "arguments": {B}}}].',
        [WEATHER, ADD, Said(".")],
    ),
    ('<tool_call>{"name": "weather", "argu', [Said('<tool_call>{"name": "weather", "argu')]),
    ('<tool_call>{"name": "other"}</tool_call>!', [Said('<tool_call>{"name": "other"}</tool_call>!')]),
    (f'{{"name": "weather", "parameters": {A}}}', [WEATHER]),
    (f'<|python_tag|>{{"name": "weather", "parameters": {A}}}; {{"name": "add", "parameters": {B}}}', [WEATHER, ADD]),
    ('{"answer": 3}', [Said('{"answer": 3}')]),
    (f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}}}, {{"name": "add", "arguments": {B}}}]', [WEATHER, ADD]),
    (f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]add[ARGS]{B}", [WEATHER, ADD]),
    (f"Well.[TOOL_CALLS]weather{A}", [Said("Well."), WEATHER]),
    ("[TOOL_CALLS]nothing", [Said("[TOOL_CALLS]nothing")]),
    ("a < b and [TOO", [Said("a < b and [TOO")]),
]


def read(text: str, cuts: list[int], **options: bool) -> list[Part]:
    reader, parts = Reader(TOOLS, **options), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.feed(text[start:end])
    return merged(parts + reader.end())


def merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind put together."""
    whole: list[Part] = []
    for part in parts:
        if whole and type(part) is type(whole[-1]) and not isinstance(part, Call):
            whole[-1] = type(part)(whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize(("text", "parts"), CASES, ids=[text[:30] for text, _ in CASES])
def test_an_answer_is_read_alike_however_it_is_cut(text: str, parts: list[Any]) -> None:
    parts = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    assert read(text, []) == parts
    assert read(text, list(range(1, len(text)))) == parts
    chance = random.Random(text)
    for _ in range(50):
        assert read(text, sorted(chance.sample(range(len(text) + 1), 2))) == parts


def test_a_thought_may_have_begun_in_the_prompt() -> None:
    assert read("hm\n</think>\n\nhello", [3, 7], is_thinking=True) == [Thought("hm"), Said("hello")]


def test_without_tools_calls_are_text() -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {A}}}</tool_call>'
    reader = Reader()
    assert merged(reader.feed(text) + reader.end()) == [Said(text)]


PIECES = st.sampled_from(
    [*MARKS, '{"name": "weather", "arguments": {}}', "{", "}", "a", " ", "\n", "[", "]", "weather"]
)


@given(st.lists(PIECES, max_size=12), st.data())
def test_any_text_is_read_alike_however_it_is_cut(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert read(text, cuts) == read(text, [])
    parts = read(text, [])
    for part, following in zip(parts, [*parts, None][1:], strict=True):
        assert not isinstance(part, Call) or (isinstance(following, Arguments) and following.text.startswith("{"))


def test_a_call_is_reported_as_soon_as_its_name_is_known_and_its_arguments_as_they_come() -> None:
    reader = Reader(TOOLS)
    assert reader.feed('<tool_call>\n{"name": "weather", "arguments": ') == []
    assert reader.feed('{"ci') == [Call("weather"), Arguments('{"ci')]
    assert reader.feed('ty": "Be') == [Arguments('ty": "Be')]
    assert reader.feed('rn"}}\n</tool_') == [Arguments('rn"}')]
    assert reader.feed("call>") == [] and reader.end() == []
