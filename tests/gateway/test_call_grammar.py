"""Grammars of calls: what they allow is read as calls of the tools, and what no template writes is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from betoken.client import ToolFormat
from betoken.gateway.call_grammar import FORMATS, CallableTool, call_grammar
from betoken.gateway.reader import Arguments, Call, Reader, Said
from betoken.router.text.tool_format import tool_format
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import Constraint
from tests.router.harness import byte_tokenizer_json, with_special_tokens

MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>"]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [CallableTool("weather", CITY), CallableTool("now", {"type": "object", "properties": {}, "maxProperties": 0})]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}


class Written:
    """A grammar in the tokens of one tokenizer, with or without marks that are special tokens."""

    def __init__(self, name: str, is_special: bool, **options: bool) -> None:
        text = with_special_tokens(byte_tokenizer_json(), *MARKS) if is_special else byte_tokenizer_json()
        added = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
        self._names = {token_id: mark for mark, token_id in added.items()}
        self._grammars = Grammars(text)
        form = ToolFormat(name, {mark: added[mark] for mark in MARKS} if is_special else {})
        self.lark = call_grammar(form, TOOLS, **options)
        self._matcher = self._grammars.compile(Constraint(lark=self.lark))

    def walk(self, rng: random.Random, most: int = 160) -> tuple[str, bool]:
        """A text of random allowed tokens, and whether it is whole."""
        matcher, text = self._matcher.deep_copy(), b""
        for _ in range(most):
            if matcher.is_accepting() and rng.random() < 0.5:
                return text.decode("utf-8", "replace"), True
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [token for token in np.flatnonzero(bits).tolist() if self._names.get(token) != "<eos>"]
            if not allowed:
                break
            marks = [token for token in allowed if token in self._names]
            token = rng.choice(marks if marks and rng.random() < 0.2 else allowed)
            matcher.consume_token(token)
            name = self._names.get(token)
            text += name.encode() if name else self._grammars._tokenizer.decode_bytes([token])
        return text.decode("utf-8", "replace"), matcher.is_accepting()

    def takes(self, text: str) -> bool:
        """Whether `text` is whole."""
        ids = self._grammars._tokenizer.tokenize_str(text, parse_special=True)
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of the answer."""
    reader, said, calls = Reader(frozenset(SCHEMAS)), "", []
    for part in [*reader.feed(text), *reader.end()]:
        match part:
            case Said(piece):
                said += piece
            case Call(name):
                calls.append((name, ""))
            case Arguments(piece):
                calls[-1] = calls[-1][0], calls[-1][1] + piece
    return said, calls


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_whole_answers_that_must_call_are_calls_that_keep_to_their_schemas(
    name: str, is_special: bool, is_parallel: bool
) -> None:
    written = Written(name, is_special, is_required=True, is_parallel=is_parallel)
    rng, nums = random.Random(1), []
    for _ in range(60):
        text, is_whole = written.walk(rng, 600)
        if not is_whole:
            continue
        said, calls = read(text)
        assert not said.strip() and calls, text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        nums.append(len(calls))
    assert len(nums) > 20
    assert (max(nums) > 1) == (is_parallel and name != "llama")


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_answers_that_may_call_say_what_they_like_but_call_by_the_schemas(name: str, is_special: bool) -> None:
    calls_of: dict[str, list[str]] = {
        "hermes": ['<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'],
        "llama": ['{"name": "weather", "parameters": %s}'],
        "mistral": ['[TOOL_CALLS][{"name": "weather", "arguments": %s}]'],
        "mistral_named": ["[TOOL_CALLS]weather[ARGS]%s"],
    }
    good, bad = '{"city": "Bern", "days": 3}', '{"city": "Rome", "days": 3}'
    for is_parallel in (True, False):
        written = Written(name, is_special, is_required=False, is_parallel=is_parallel)
        (call,) = calls_of[name]
        lead = "" if name == "llama" else "I ask.\n"
        assert written.takes("") and written.takes("Just text, {} and so on.")
        assert written.takes(lead + call % good) and not written.takes(lead + call % bad)
        twice = {"hermes": f"{call % good}\n{call % good}", "mistral_named": call % good + call % good}.get(name, "")
        if twice:
            assert written.takes(twice) == is_parallel


def test_a_templates_form_is_found_by_its_marks() -> None:
    assert tool_format("{{ '<tool_call>' }}", {"<tool_call>": 7}).name == "hermes"
    assert dict(tool_format("[TOOL_CALLS]", {"[TOOL_CALLS]": 9}).mark_ids) == {"[TOOL_CALLS]": 9}
    assert tool_format("[TOOL_CALLS] [ARGS]", {}).name == "mistral_named"
    assert tool_format("<|start_header_id|> parameters", {}).name == "llama"
    assert tool_format("<tool_call><function=", {}).name == tool_format("plain", {}).name == ""
