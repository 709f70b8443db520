"""Grammars of calls: what they allow is read as calls of the tools, and what no template writes is refused."""

# ruff: noqa: E501 (lines of chat templates and answers as models write them)

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from betoken.client import ToolFormat
from betoken.common.tool_formats import MARKS, SIGNATURES
from betoken.gateway.tool_calls.grammar import LAYOUTS, CallableTool, call_grammar
from betoken.gateway.tool_calls.parser import ToolCallParser
from betoken.gateway.tool_calls.parts import Arguments, Call, Content
from betoken.gateway.tool_calls.tagged_grammar import UnsupportedSchemaError
from betoken.router.text.tool_format import tool_format
from betoken.rpc.constraints import Grammars
from betoken.v1.generation_pb2 import ToolFormat as ToolFormatMessage
from betoken.v1.types_pb2 import Constraint
from tests.products import covering
from tests.router.harness import byte_tokenizer_json, with_special_tokens

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
        text = with_special_tokens(byte_tokenizer_json(), *sorted(MARKS)) if is_special else byte_tokenizer_json()
        added = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
        self._names = {token_id: mark for mark, token_id in added.items()}
        self._grammars, self._fast = Grammars(text), Tokenizer.from_str(text)
        (marks, *_) = (each.marks for each in SIGNATURES if each.name == name)
        form = ToolFormat(name, {mark: added[mark] for mark in marks} if is_special else {})
        self.lark = call_grammar(form, TOOLS, **options)
        self._matcher = self._grammars.compile(Constraint(lark=self.lark))

    def walk(self, rng: random.Random, most: int = 160) -> tuple[str, bool]:
        """A text of random allowed tokens, and whether it is whole."""
        matcher, text = self._matcher.deep_copy(), b""
        for _ in range(most):
            if matcher.is_accepting() and rng.random() < 0.5:
                return text.decode("utf-8", "replace"), True
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            ids = np.flatnonzero(bits[: self._grammars.vocab_size]).tolist()  # without llguidance's end of an answer
            allowed = [token for token in ids if self._names.get(token) != "<eos>"]
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
        ids = self._fast.encode(text, add_special_tokens=False).ids
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(form: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    parser, said, calls = ToolCallParser(form, SCHEMAS), "", []
    for part in [*parser.feed(text), *parser.end()]:
        match part:
            case Content(piece):
                said += piece
            case Call(name):
                calls.append((name, ""))
            case Arguments(piece):
                calls[-1] = calls[-1][0], calls[-1][1] + piece
    return said, calls


@pytest.mark.parametrize(("name", "is_special", "is_parallel"), covering(LAYOUTS, [True, False], [True, False]))
def test_whole_answers_that_must_call_are_calls_that_keep_to_their_schemas(
    name: str, is_special: bool, is_parallel: bool
) -> None:
    written = Written(name, is_special, is_required=True, is_parallel=is_parallel)
    rng, nums = random.Random(1), []
    for _ in range(60):
        text, is_whole = written.walk(rng, 600)
        if not is_whole:
            continue
        said, calls = read(name, text)
        assert not said.strip() and calls, text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        nums.append(len(calls))
    assert len(nums) > 20
    assert (max(nums) > 1) == (is_parallel and not LAYOUTS[name].is_single)


JSON_CALL = '{"name": "weather", "arguments": {"city": "CITY", "days": 3}}'
OBJECT = '{"city": "CITY", "days": 3}'
PARAMETERS = "<function=weather>\n<parameter=city>\nCITY\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
PAIRS = "<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
CALLS: dict[str, tuple[str, str, str, str]] = {
    "hermes": ("", f"<tool_call>\n{JSON_CALL}\n</tool_call>", "\n", ""),
    "llama": ("", JSON_CALL.replace("arguments", "parameters"), "", ""),
    "mistral": ("[TOOL_CALLS][", JSON_CALL, ", ", "]"),
    "mistral_named": ("", f"[TOOL_CALLS]weather[ARGS]{OBJECT}", "", ""),
    "granite": ("<|tool_call|>[", JSON_CALL, ", ", "]"),
    "hunyuan": ("<tool_calls>[", JSON_CALL, ", ", "]</tool_calls>"),
    "nemotron": ("<TOOLCALL>[", JSON_CALL, ", ", "]</TOOLCALL>"),
    "phi4_mini": ("functools[", JSON_CALL, ", ", "]"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OBJECT}\n```<｜tool▁call▁end｜>",
        *("\n", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>",
        *("", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|>",
        *("", "<|tool_calls_section_end|>"),
    ),
    "harmony": ("", f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OBJECT}", "", ""),
    "qwen3_coder": ("", f"<tool_call>\n{PARAMETERS}\n</tool_call>", "\n", ""),
    "seed_oss": ("", f"<seed:tool_call>\n{PARAMETERS}\n</seed:tool_call>", "\n", ""),
    "glm45": ("", f"<tool_call>weather\n{PAIRS}", "\n", ""),
    "hunyuan_v3": ("<tool_calls>\n", f"<tool_call>weather<tool_sep>\n{PAIRS}", "\n", "\n</tool_calls>"),
    "minimax_m2": (
        "<minimax:tool_call>\n",
        '<invoke name="weather">\n<parameter name="city">CITY</parameter>\n<parameter name="days">3</parameter>\n</invoke>',
        *("\n", "\n</minimax:tool_call>"),
    ),
}
"""Section's begin, a call, text between calls, section's end."""


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_answers_that_may_call_contain_any_text_and_calls_that_keep_to_their_schemas(
    name: str, is_special: bool
) -> None:
    begin, call, between, end = CALLS[name]
    good, bad = call.replace("CITY", "Bern"), call.replace("CITY", "Rome")
    for is_parallel in (True, False):
        written = Written(name, is_special, is_required=False, is_parallel=is_parallel)
        lead = "" if name in ("llama", "harmony") else "I ask.\n"
        assert written.takes("") and written.takes("Just text, {} and so on.")
        assert written.takes(lead + begin + good + end) and not written.takes(lead + begin + bad + end)
        said, calls = read(name, lead + begin + good + end)
        assert (said, len(calls)) == (lead.strip(), 1)
        written = Written(name, is_special, is_required=True, is_parallel=is_parallel)
        assert written.takes(begin + good + end) and not written.takes(begin + bad + end)
        if not LAYOUTS[name].is_single:
            twice = begin + good + between + good + end
            assert written.takes(twice) == is_parallel and len(read(name, twice)[1]) == 2


@pytest.mark.parametrize("schema", [{"$ref": "#/x"}, {"properties": {"a": {"type": "string", "pattern": "b+"}}}])
def test_a_schema_that_a_tagged_format_cannot_keep_to_is_rejected_by_its_keyword(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchemaError, match=r"ref at the top|pattern of a"):
        call_grammar(ToolFormat("glm45", {}), [CallableTool("f", schema)], is_required=True, is_parallel=True)


TEMPLATES = {
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}',
    "qwen3_coder": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + args_name + '>\\n' }}",
    "glm45": "{{ '\\n<tool_call>' + tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "hunyuan_v3": "{{ '<tool_calls>\\n<tool_call>' + name + '<tool_sep>\\n' }}<arg_key>{{ k }}</arg_key>",
    "mistral": '{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}',
    "mistral_named": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "llama": '{{- \'<|start_header_id|>user<|end_header_id|>\\n\\n\' }}{"name": function name, "parameters": dictionary}',
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + arguments",
    "kimi_k2": "<|tool_calls_section_begin|>{%- for tool_call in tool_calls %}<|tool_call_begin|>{{ id }}",
    "granite": "{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}",
    "minimax_m2": "{{- '\\n<minimax:tool_call>\\n' }}<invoke name=\"{{ tool_call.name }}\">",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' }}",
    "lfm2": "{{- 'List of tools: <|tool_list_start|>[' }}",
    "harmony": "{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}",
    "": "{{ '<tool_calls>\\n<tool_call>' + name + '\\n```json\\n' + arguments }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_templates_format_is_found_by_what_it_writes(name: str) -> None:
    assert tool_format(TEMPLATES[name], {}).name == name


def test_the_hermes_format_is_found_in_the_templates_of_qwen() -> None:
    """They describe a call to the model with a placeholder that looks like a tag."""
    described = '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
    assert tool_format(f'{{{{- "{described}" }}}}{TEMPLATES["hermes"]}', {}).name == "hermes"


def test_a_call_between_marks_of_phi_4_mini_is_not_taken_for_granite() -> None:
    template = "{{- '<|tool_call|>' + (tool_call['function'] | tojson) + '<|/tool_call|>' -}}"
    assert tool_format(template, {}).name == ""


def test_a_templates_marks_have_ids_if_they_are_special_tokens() -> None:
    assert tool_format("plain", {"<tool_call>": 7}) == ToolFormatMessage()
    assert dict(tool_format("[TOOL_CALLS]", {"[TOOL_CALLS]": 9}).mark_ids) == {"[TOOL_CALLS]": 9}
