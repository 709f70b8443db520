"""Mutated HTTP requests: JSON, bytes and headers with small faults, as the bytes that a socket sends.

Knows the gateway's endpoints; sends nothing.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
_THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": False}
_SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": ["the", "a"], "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "logprobs": 2}
        | {"stop": ["x"], "logit_bias": {"3": 1.5}, "stream": True, "stream_options": {"include_usage": True}}
        | {"betoken": {"drafter": "ngram", "drafter_settings": {"max_ngram": 3}, "provenance": True, "rounds": True}},
    ),
    (
        "/v1/completions",
        {"prompt": [3, 4], "max_tokens": 3, "echo": True, "logprobs": 1, "stop_token_ids": [3], "user": "u"},
    ),
    (
        "/v1/chat/completions",
        {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}}
        | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [_CALL]}], "max_completion_tokens": 3}
        | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto"},
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 3}
        | {"tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}}, "instructions": "b"},
    ),
    (
        "/v1/responses",
        {"input": [_CALL_ITEM, {"type": "function_call_output", "call_id": "1", "output": "a"}, _THOUGHT]}
        | {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}, "reasoning": {"effort": None}}
        | {"max_output_tokens": 3, "stream": True, "store": False, "parallel_tool_calls": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True, "n": 2}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}}
        | {"prediction": {"type": "content", "content": [{"type": "text", "text": "abc"}]}},
    ),
    (
        "/v1/completions",
        {"prompt": "the", "max_tokens": 3, "betoken": {"constraint": {"regex": "[a-c]+"}, "off": True}}
        | {"min_tokens": 1, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "prediction": {"content": "a"}},
    ),
    ("/tokenize", {"prompt": "the", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
_JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
    0.1,
    -0.0,
    1e308,
    "",
    "a",
    "\x00",
    "\ud800",
]
_JUNK += [
    "é" * 300,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    {"a": 1},
    ["a", 1],
    [1, 2, 3],
    "none",
    "text",
    [[1], "a"],
    float("nan"),
]
_HEADERS = ["x-request-id", "traceparent", "authorization", "content-type", "accept", "origin", "host", "expect"]
_RAW_SHARE = 0.1
"""Share of requests whose bytes are mutated, too."""


def request_bytes(chance: random.Random) -> bytes:
    """Return the next mutated request."""
    return _mutated_bytes(chance) if chance.random() < _RAW_SHARE else _written(*_mutated(chance))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON value."""
    found = [path]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        found += _paths(entry, (*path, key))
    return found


def _mutated(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    path, seed = chance.choice(_SEEDS)
    body: Any = copy.deepcopy(seed)
    for _ in range(chance.randint(1, 3)):
        *above, last = chance.choice(_paths(body)[1:] or [("prompt",)])
        inner = body
        for key in above:
            inner = inner[key]
        kind = chance.random()
        if kind < 0.2 and isinstance(inner, dict):
            inner.pop(last, None)
        elif kind < 0.3 and isinstance(inner, dict):
            inner[chance.choice(["", "n", "tools", "best_of", "suffix", "é", "model", "stream"])] = chance.choice(_JUNK)
        else:
            inner[last] = copy.deepcopy(chance.choice(_JUNK))
    data = json.dumps(body).encode()
    if chance.random() < 0.15:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + chance.randint(0, 2) :]
    headers = {"content-type": "application/json"}
    if chance.random() < 0.2:
        headers[chance.choice(_HEADERS)] = "".join(chance.choices("az09 -_;=/é", k=chance.randint(0, 40))).strip()
    return path, data, headers


def _written(path: str, data: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


def _mutated_bytes(chance: random.Random) -> bytes:
    """Return a request with bytes and lines that are changed, left out and doubled."""
    path, data, headers = _mutated(chance)
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if chance.random() < 0.1:
        lines[3] = "transfer-encoding: chunked"
        data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    for _ in range(chance.randint(0, 2)):
        at = chance.randrange(len(lines))
        lines[at : at + 1] = chance.choice([[], [lines[at]] * 2, [lines[at] + "9"], ["a" * 300], [lines[at][:7]]])
    request = bytearray("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(request))
        request[at : at + chance.randint(0, 2)] = bytes(chance.choices(range(256), k=chance.randint(0, 2)))
    return bytes(request)
