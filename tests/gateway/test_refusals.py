"""Rejections by name: fields, values, bodies, requests of any kind; always in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.conftest import Gate, MakeGate

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),  # its model has no tokens for a gap
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    (CHATS, {"messages": CHAT, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5000}, "max_tokens"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 3]}, "prompt"),
    (COMPLETIONS, {"prompt": [100000]}, "prompt[0]"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": 1e300}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_k": 2**40}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "a", "seed": 1.5}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "a", "stop": 3}, "stop"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"9999999": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "user": "x" * 200}, "user"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "wishes": 3}, "wishes"),
    (COMPLETIONS, {"prompt": "a", "betoken": {"wishes": 3}}, "betoken.wishes"),
    (COMPLETIONS, {"prompt": "a", "betoken": {"drafter": "nobody"}}, "betoken.drafter"),
    (COMPLETIONS, {"prompt": "a", "betoken": {"off": True, "drafter": "ngram"}}, "betoken.drafter"),
    (COMPLETIONS, {"prompt": "a", "betoken": {"num_draft_tokens": 0}}, "betoken.num_draft_tokens"),
    (COMPLETIONS, {"prompt": "a", "betoken": {"mode": "typical"}}, "betoken.mode"),
    (COMPLETIONS, {"prompt": "a", "betoken": {"escape_special_tokens": True}}, "betoken.escape_special_tokens"),
    (COMPLETIONS, {"prompt": [5], "betoken": {"add_special_tokens": False}}, "betoken.add_special_tokens"),
    (CHATS, {"messages": CHAT, "betoken": {"add_special_tokens": False}}, "betoken.add_special_tokens"),
    (CHATS, {"messages": CHAT, "betoken": {"constraint": {"regex": "a"}}}, "betoken.constraint.regex"),
    (CHATS, {"messages": []}, "messages"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHATS, {"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHATS, {"messages": [{"role": "tool", "content": "a"}]}, "messages"),  # the template raises
    (CHATS, {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
    (CHATS, {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHATS, {"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHATS, {"messages": CHAT, "max_completion_tokens": 10**6}, "max_completion_tokens"),
    (CHATS, {"messages": CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHATS, {"messages": CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHATS,
        {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (CHATS, {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format.json_object"),
    (CHATS, {"messages": CHAT, "prediction": {"type": "content", "content": "a"}}, "prediction"),
    (CHATS, {"messages": CHAT, "functions": [{"name": "f"}]}, "functions"),
    (CHATS, {"messages": CHAT, "audio": {}}, "audio"),
    (CHATS, {"messages": CHAT, "modalities": ["audio"]}, "modalities"),
    (CHATS, {"messages": CHAT, "store": True}, "store"),
    (CHATS, {"messages": CHAT, "metadata": {"a": "b"}}, "metadata"),
    (CHATS, {"messages": CHAT, "service_tier": "flex"}, "service_tier"),
    (CHATS, {"messages": CHAT, "web_search_options": {}}, "web_search_options"),
    (CHATS, {"messages": CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
]
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a", "suffix": "", "best_of": 1, "n": 1, "logit_bias": {}, "stop": None, "user": "u"}),
    (CHATS, {"messages": CHAT, "store": False, "metadata": {}, "service_tier": "auto", "modalities": ["text"]}),
    (CHATS, {"messages": CHAT, "response_format": {"type": "text"}, "functions": [], "max_tokens": 3}),
    (CHATS, {"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 3, "prediction": None, "stream": None}),
]


@pytest.fixture
async def gate(make_gate: MakeGate) -> Gate:
    return await make_gate(
        gateway={"max_body_bytes": 4096, "body_timeout_s": 0.5}, verify_hellos=[{"max_context": 256}]
    )


async def test_every_rejection_names_its_field(gate: Gate) -> None:
    named = []
    for path, body, _ in REFUSED:
        reply = await gate.post(path, body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["type"] == "invalid_request_error", (body, reply.text)
        assert error["message"].startswith(error["param"]), error
        named.append((path, body, error["param"]))
    assert named == REFUSED


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 0}, "n = 0: must be at least 1"),
        ({"max_tokens": True}, "max_tokens = true: must be an integer"),
        ({"temperature": "0"}, 'temperature = "0": must be a number'),
        ({"stream": 1}, "stream = 1: must be true or false"),
        ({"user": 3}, "user = 3: must be text"),
        ({"logit_bias": [1]}, "logit_bias = a list of 1: must be an object"),
        ({"stop_token_ids": [0] * 65}, "stop_token_ids: must have at most 64 entries"),
        ({"stop_token_ids": ["a" * 99]}, 'stop_token_ids[0] = "' + "a" * 39 + "...: must be an integer"),
        ({"betoken": {"mode": "x"}}, "betoken.mode = \"x\": must be 'coupled', 'rejection' or 'typical'"),
        ({"betoken": {"drafter_settings": {"a": []}}}, "betoken.drafter_settings.a: must be text or a number"),
        ({"wishes": 3}, "wishes: is not a known field"),
    ],
)
async def test_an_invalid_value_is_rejected_with_field_value_and_limit(gate: Gate, body: Any, message: str) -> None:
    reply = await gate.post(COMPLETIONS, {"prompt": "a"} | body)
    assert reply.json()["error"]["message"] == message


async def test_neutral_values_of_unsupported_fields_are_accepted(gate: Gate) -> None:
    for path, body in NEUTRAL:
        reply = await gate.post(path, body)
        assert reply.status_code == 200, reply.text


async def test_a_prompt_beyond_the_context_has_openais_code(gate: Gate) -> None:
    reply = await gate.post(COMPLETIONS, {"prompt": [5] * 256})
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"null", "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 400),  # a form of another page could send it
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "application/json", 400),
        (b'{"prompt": ' + b"[" * 4000 + b"}", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": "' + b"a" * 5000 + b'"}', "application/json", 413),
    ],
)
async def test_invalid_bodies_are_rejected(gate: Gate, data: bytes, kind: str, status: int) -> None:
    reply = await gate.http.post(COMPLETIONS, content=data, headers={"content-type": kind})
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_chunked_body_is_counted_and_a_slow_one_not_waited_for(gate: Gate) -> None:
    async def large() -> Any:
        for _ in range(5):
            yield b" " * 1000

    reply = await gate.http.post(COMPLETIONS, content=large(), headers={"content-type": "application/json"})
    assert reply.status_code == 413
    host, port = gate.url.removeprefix("http://").split(":")
    for sent in (
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert (b"408" in answer) == sent.endswith(b"{")


async def test_an_endless_request_head_is_cut_off(gate: Gate) -> None:
    host, port = gate.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ConnectionError):
        for _ in range(10000):
            writer.write(b"a: " + b"b" * 1000 + b"\r\n")
            await writer.drain()
    writer.close()


async def test_a_request_that_is_not_http_is_rejected_in_openais_format(gate: Gate) -> None:
    host, port = gate.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"hello\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
