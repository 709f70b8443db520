"""Tokenization in both directions, and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import Gate


async def test_text_to_tokens_and_back(gate: Gate, tokenizer: Any) -> None:
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


async def test_tokens_that_are_none_are_refused_by_name(gate: Gate) -> None:
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


async def samples(gate: Gate) -> dict[tuple[str, ...], float]:
    text = (await gate.http.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_equal_the_counts_of_answers(gate: Gate) -> None:
    stats: list[dict[str, Any]] = []
    for stream in (False, True):
        body = {"prompt": "the", "max_tokens": 30, "stream": stream, "n": 2}
        reply = await gate.post("/v1/completions", body)
        if not stream:
            stats += [choice["betoken"]["speculation"] for choice in reply.json()["choices"]]
    told = await samples(gate)
    assert told["betoken_answers_total", "length", "fake"] == 4
    assert told["betoken_prompt_tokens_total", "fake"] == 4
    for ours, theirs, field in (
        ("betoken_drafts", "vllm:spec_decode_num_drafts", "num_drafts"),
        ("betoken_draft_tokens", "vllm:spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("betoken_accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "num_accepted_tokens"),
    ):
        count = sum(stat[field] for stat in stats)
        assert told[f"{ours}_total", "fake"] == told[f"{theirs}_total", "0", "fake"] >= count > 0
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    positions = sum(value for name, value in told.items() if name[0] == per_position)
    assert positions == told["betoken_accepted_tokens_total", "fake"]
    by_source = sum(value for name, value in told.items() if name[0] == "betoken_output_tokens_total")
    assert by_source == 120
    assert told["betoken_http_requests_total", "POST", "/v1/completions", "200"] == 2
    assert told["gen_ai_server_time_to_first_token_seconds_count", "fake"] == 4
    assert told["betoken_http_requests_running",] == 0
    address = gate.cluster.verifiers[0].address
    assert told["betoken_worker_ready", address, "verify"] == 1
    assert (
        0
        < told["betoken_worker_pages_free", address, "verify"]
        <= told["betoken_worker_pages_limit", address, "verify"]
    )


async def test_a_path_that_is_none_makes_no_label_of_its_own(gate: Gate) -> None:
    for path in ("/a", "/b", "/v1/models/x", "/v1/models/y"):
        await gate.http.get(path)
    told = await samples(gate)
    assert told["betoken_http_requests_total", "GET", "other", "404"] == 2
    assert told["betoken_http_requests_total", "GET", "/v1/models/{model:path}", "404"] == 2
