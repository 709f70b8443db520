"""Prometheus metrics of the gateway."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import Gate


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


async def test_an_unknown_path_has_no_metric_label(gate: Gate) -> None:
    for path in ("/a", "/b", "/v1/models/x", "/v1/models/y"):
        await gate.http.get(path)
    told = await samples(gate)
    assert told["betoken_http_requests_total", "GET", "other", "404"] == 2
    assert told["betoken_http_requests_total", "GET", "/v1/models/{model:path}", "404"] == 2
