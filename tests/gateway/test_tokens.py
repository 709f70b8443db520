"""Tokenization in both directions."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import Gate


async def test_tokenize_and_detokenize_are_inverse(gate: Gate, tokenizer: Any) -> None:
    there = (await gate.post("/tokenize", {"prompt": "the é", "return_token_strs": True})).json()
    assert there["tokens"] == tokenizer.encode("the é")
    assert there["count"] == len(there["tokens"]) and there["max_model_len"] == 2048
    assert there["token_strs"][0] == "the"
    back = (await gate.post("/detokenize", {"tokens": there["tokens"], "model": "fake"})).json()
    assert back == {"prompt": "the é"}
    assert (await gate.post("/tokenize", {"prompt": ""})).json()["tokens"] == []


async def test_a_chat_is_tokenized_as_it_is_completed(gate: Gate) -> None:
    messages = [{"role": "user", "content": "the"}]
    ids = (await gate.post("/tokenize", {"messages": messages})).json()["tokens"]
    by_chat = await gate.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "seed": 1})
    by_ids = await gate.post("/v1/completions", {"prompt": ids, "max_tokens": 8, "seed": 1})
    assert by_chat.json()["choices"][0]["message"]["content"] == by_ids.json()["choices"][0]["text"]
    assert by_chat.json()["usage"]["prompt_tokens"] == len(ids)


async def test_invalid_token_ids_are_rejected_by_name(gate: Gate) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ):
        reply = await gate.post(path, body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert (await gate.post("/tokenize", {"prompt": "a", "model": "other"})).status_code == 404
