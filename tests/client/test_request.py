"""Conversion of keyword arguments to requests."""

import json
import re
import subprocess
import sys
from collections import deque
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from betoken.client import InvalidArgumentError, Sampling, Speculation, VerificationMode
from betoken.client.config import SamplingOptions, SpeculationOptions
from betoken.client.request import generate_request, tokenize_request
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2


@pytest.mark.parametrize("config, options", [(Sampling, SamplingOptions), (Speculation, SpeculationOptions)])
def test_every_field_is_also_a_keyword_argument(config: Any, options: Any) -> None:
    assert {field.name: field.type for field in fields(config)} == {
        name: hint.__forward_arg__ for name, hint in options.__annotations__.items()
    }


def test_every_sampling_field_of_the_protocol_can_be_set() -> None:
    assert {field.name for field in fields(Sampling)} == set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_arguments_reach_the_message_and_win_over_the_config() -> None:
    request = generate_request(
        "hi",
        {
            "sampling": Sampling(temperature=0.5, top_k=3, logit_bias={4: -1.5}, stop="x"),
            "temperature": 0.0,
            "stop_token_ids": (7,),
            "ignore_eos": False,
            "speculation": Speculation(drafter="ngram", drafter_settings={"max_ngram": 4}),
            "num_draft_tokens": 6,
            "mode": VerificationMode.REJECTION,
            "resume_ids": range(2),
        },
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, list(sampling.stop)) == (0, 3, ["x"])
    assert sampling.HasField("ignore_eos") and not sampling.HasField("seed")
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(4, -1.5)]
    assert request.speculation.drafter.name == "ngram" and request.speculation.drafter.settings["max_ngram"] == "4"
    assert request.speculation.num_draft_tokens == 6
    assert request.speculation.mode == types_pb2.VERIFICATION_MODE_REJECTION
    assert list(request.resume_ids) == [0, 1]


def test_a_constraint_is_one_of_its_kinds() -> None:
    for given, expected in (
        ({"json_object": True}, {"json_object": True}),
        ({"json_schema": {"type": "null"}, "regex": None}, {"json_schema": '{"type": "null"}'}),
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"choice": ("a", "b")}, {"choice": {"texts": ["a", "b"]}}),
        ({"lark": "start: a"}, {"lark": "start: a"}),
    ):
        assert generate_request("hi", {"constraint": given}).constraint == types_pb2.Constraint(**expected)
    assert not generate_request("hi", {"constraint": None}).HasField("constraint")
    for bad, field in (
        ({}, "constraint"),
        ({"xml": "a"}, "constraint"),
        ({"regex": "a", "lark": "b"}, "constraint"),
        ("json", "constraint"),
        ({"regex": 5}, "constraint.regex"),
        ({"choice": "yes"}, "constraint.choice"),
        ({"json_schema": {1j}}, "constraint.json_schema"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{field} = "):
            generate_request("hi", {"constraint": bad})


def test_a_suffix_makes_a_text_the_prefix_of_an_infill() -> None:
    request = generate_request("a", {"suffix": "b", "files": [("c.py", "d"), ("c.py", "e")]})
    files = [pb.InfillFile(name="c.py", text="d"), pb.InfillFile(name="c.py", text="e")]
    assert request.infill == pb.Infill(prefix="a", suffix="b", files=files)
    assert generate_request("a", {"suffix": ""}).WhichOneof("input") == "infill"
    assert generate_request("a", {"suffix": None}).WhichOneof("input") == "prompt"
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ([1], {"suffix": "b"}, "infill.suffix = set: needs a prompt of text"),
        ("a", {"suffix": 5}, "infill.suffix = 5: must be valid Unicode text"),
        ("a", {"files": [("a", "b")]}, "infill.files = set: needs a suffix"),
        ("a", {"suffix": "", "files": [("a", None)]}, r"infill.files\[0\] = .*must be a name and a text"),
    ]
    for prompt, options, message in bad:
        with pytest.raises(InvalidArgumentError, match=message):
            generate_request(prompt, options)  # type: ignore[arg-type]


def test_a_prompt_is_text_ids_or_messages() -> None:
    assert generate_request("hi", {}).prompt == "hi"
    for ids in ([1, 2], range(1, 3), np.array([1, 2]), deque([1, 2]), {"a": 1, "b": 2}.values()):
        assert list(generate_request(ids, {}).prompt_ids.ids) == [1, 2]  # type: ignore[arg-type]
    assert generate_request([], {}).WhichOneof("input") == "prompt_ids"
    chat = generate_request([{"role": "user", "content": "hi"}], {}).messages.messages
    assert (chat[0].role, chat[0].content) == ("user", "hi")
    assert tokenize_request("hi").prompt == "hi"


def test_tokenization_options_are_sent_only_if_they_apply() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for request in (
        generate_request(chat, {"continue_final_message": True, "escape_special_tokens": True}),  # type: ignore[arg-type]
        tokenize_request(chat, {"continue_final_message": True, "escape_special_tokens": True}),  # type: ignore[arg-type]
    ):
        assert request.messages.continue_final_message and request.messages.escape_special_tokens
        assert not request.HasField("add_special_tokens")
    for request in (generate_request("hi", {}), tokenize_request("hi")):
        assert not request.HasField("add_special_tokens")
    for request in (
        generate_request("hi", {"add_special_tokens": False}),
        tokenize_request("hi", {"add_special_tokens": False}),
    ):
        assert request.HasField("add_special_tokens") and not request.add_special_tokens
    for name in ("continue_final_message", "escape_special_tokens"):
        with pytest.raises(InvalidArgumentError, match=f"{name} = set: needs a prompt of chat messages"):
            generate_request("hi", {name: True})  # type: ignore[misc]
    with pytest.raises(TypeError, match="'temperature'"):
        tokenize_request("hi", {"temperature": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    "prompt, options, field",
    [
        ("\ud800", {}, "prompt"),
        (b"hi", {}, "prompt"),
        (None, {}, "prompt"),
        ({1, 2}, {}, "prompt"),
        (np.array(1), {}, "prompt"),
        pytest.param(memoryview(b"hi"), {}, "prompt", id="memoryview"),  # its repr is never twice the same
        ([-1], {}, "prompt_ids"),
        ([1, "a"], {}, "prompt_ids"),
        ([{"role": "user", "text": "hi"}], {}, "messages[0].content"),
        ([{"role": "user", "content": 5}], {}, "messages[0]"),
        ([{"role": "user"}], {}, "messages[0].content"),
        ([{"role": "user", "content": "hi"}, {"role": None, "content": "hi"}], {}, "messages[1].role"),
        ("hi", {"top_k": -1}, "sampling.top_k"),
        ("hi", {"top_k": 1.5}, "sampling.top_k"),
        ("hi", {"temperature": "warm"}, "sampling.temperature"),
        ("hi", {"temperature": 10**400}, "sampling.temperature"),
        ("hi", {"seed": 2**64}, "sampling.seed"),
        ("hi", {"stop": ["\ud800"]}, "sampling.stop"),
        ("hi", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ("hi", {"logit_bias": [(1, 2.0)]}, "sampling.logit_bias"),
        ("hi", {"logit_bias": {None: 2.0}}, "sampling.logit_bias"),
        ("hi", {"logit_bias": {1: None}}, "sampling.logit_bias"),
        ("hi", {"sampling": {"temperature": 0}}, "sampling"),
        ("hi", {"speculation": Sampling()}, "speculation"),
        ("hi", {"mode": "guess"}, "speculation.mode"),
        ("hi", {"num_draft_tokens": -2}, "speculation.num_draft_tokens"),
        ("hi", {"drafter": 3}, "speculation.drafter.name"),
        ("hi", {"drafter_settings": {"a": None}}, "speculation.drafter.settings"),
        ("hi", {"drafter_settings": {5: "a"}}, "speculation.drafter.settings"),
        ("hi", {"drafter_settings": ["a"]}, "speculation.drafter.settings"),
        ("hi", {"resume_ids": [2**32]}, "resume_ids"),
        ("hi", {"stop_token_ids": b"ab"}, "sampling.stop_token_ids"),
        ("hi", {"tenant": 5}, "tenant"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_values_that_a_message_cannot_hold_are_rejected_by_name(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(field)} = "):
        generate_request(prompt, options)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'temprature'"):
        generate_request("hi", {"temprature": 1})  # type: ignore[typeddict-unknown-key]


def test_ids_cannot_be_tokenized() -> None:
    with pytest.raises(InvalidArgumentError, match="^prompt = "):
        tokenize_request([1, 2])  # type: ignore[list-item]


def test_a_number_longer_than_python_writes_is_refused_too() -> None:
    with pytest.raises(InvalidArgumentError, match=r"sampling.max_new_tokens = int: must be"):
        generate_request("hi", {"max_new_tokens": 10**5000})


def test_usual_calls_of_the_sdk_pass_a_strict_type_checker(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "from contextlib import aclosing, closing\n"
        "from typing import Unpack\n"
        "from betoken.client import AsyncClient, Client, GenerateOptions, Prompt\n"
        "def ask(prompt: Prompt, **options: Unpack[GenerateOptions]) -> str:\n"
        "    return Client().complete(prompt, **options).text\n"
        "ask('hi', temperature=0, tenant='me', timeout_s=1.5)\n"
        "with closing(iter(Client().generate('hi'))) as pieces:\n    next(pieces)\n"
        "aclosing(aiter(AsyncClient().generate('hi')))\n"
        "ask('hi')\nask([1, 2])\nask(range(2))\nask([{'role': 'user', 'content': 'hi'}])\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 0, done.stdout


def test_a_chat_takes_tools_and_template_arguments() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 2}}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    options = {"tools": [{"name": "f"}], "template_arguments": {"enable_thinking": False}}
    request = generate_request(chat, options | {"continue_final_message": True}).messages
    assert json.loads(request.messages[1].extra) == {"tool_calls": [call]} and not request.messages[0].extra
    assert request.messages[1].extra.index('"z"') < request.messages[1].extra.index('"a"')
    assert list(map(json.loads, request.tools)) == options["tools"] and request.continue_final_message
    assert json.loads(request.template_arguments) == options["template_arguments"]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("hi", {"tools": [{}]}, "tools"),
        ([1, 2], {"template_arguments": {"a": 1}}, "template_arguments"),
        ("hi", {"continue_final_message": True}, "continue_final_message"),
        ([{"role": "user", "content": "a"}], {"tools": [3]}, "tools"),
        ([{"role": "user", "content": "a"}], {"tools": [{"a": b"b"}]}, "tools"),
        ([{"role": "user", "content": "a"}], {"template_arguments": {"a": object()}}, "template_arguments"),
        ([{"role": "user", "content": "a", "name": object()}], {}, "messages[0]"),
    ],
)
def test_values_that_no_chat_template_takes_are_rejected_by_name(prompt, options, field) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(field)} = "):
        generate_request(prompt, options)
