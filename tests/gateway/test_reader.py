"""Thoughts, calls and text of an answer, however its text is cut; what is no call stays text, whole."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from betoken.gateway.reader import MARKS, Call, Part, Reader, Said, Thought

TOOLS = frozenset(("weather", "add"))
WEATHER = Call("weather", '{"city": "Bern"}')
ADD = Call("add", '{"a": 1, "b": [2, {"c": "}"}]}')
A, B = '{"city": "Bern"}', '{"a": 1, "b": [2, {"c": "}"}]}'

CASES: list[tuple[str, list[Part]]] = [
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
def test_an_answer_is_read_alike_however_it_is_cut(text: str, parts: list[Part]) -> None:
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
    for part in read(text, []):
        assert not isinstance(part, Call) or isinstance(json.loads(part.arguments), dict)
