"""`metrics.speculative_decoding` of responses, in vLLM's format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from betoken.loadtest.acceptance import of_event
from betoken.loadtest.endpoint import Endpoint
from betoken.loadtest.load import run_closed
from betoken.loadtest.prompts import Prompt
from betoken.loadtest.record import RequestOptions, ask
from tests.gateway.conftest import Gate, MakeGate

TEXT = {
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}]},
}
FIELDS = {
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram"),
    *("acceptance_histogram_by_draft_length", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"),
    "num_spec_tokens",
}


async def replies(gate: Gate, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The reply, or its events."""
    reply = await gate.post(path, TEXT[path] | {"max_tokens": 40} | fields)
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        return [reply.json()]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", TEXT)
@pytest.mark.parametrize("level", ["summary", "detailed"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_the_acceptance_of_its_request(make_gate: MakeGate, path, level, stream) -> None:
    gate = await make_gate({"per_request_spec_decode_metrics": level})
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    events = await replies(gate, path, betoken={"num_draft_tokens": 4}, **options)
    assert not any("metrics" in event for event in events[:-1])
    told = events[-1]["metrics"]["speculative_decoding"]
    ended = events[-2 if stream else -1]["choices"][0]["betoken"]
    stats = ended["speculation"]
    assert set(told) - FIELDS == ({"per_step_accepted", "per_step_drafted"} if level == "detailed" else set())
    assert told["num_spec_steps"] == stats["num_drafts"] > 0
    assert told["num_draft_tokens"] == stats["num_draft_tokens"]
    assert told["num_accepted_draft_tokens"] == stats["num_accepted_tokens"]
    histogram = told["acceptance_histogram"]  # the invariants that load generators check
    assert len(histogram) == told["num_spec_tokens"] + 1
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert told["mean_acceptance_length"] == 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    assert told["draft_acceptance_rate"] == told["num_accepted_draft_tokens"] / told["num_draft_tokens"]
    by_length = told["acceptance_histogram_by_draft_length"]
    assert all(len(counts) == int(length) + 1 for length, counts in by_length.items())
    assert sum(map(sum, by_length.values())) == told["num_spec_steps"]
    if level == "detailed":
        assert len(told["per_step_accepted"]) == len(told["per_step_drafted"]) == told["num_spec_steps"]
        assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
        assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]
    assert not any("rounds" in choice.get("betoken", {}) for event in events for choice in event["choices"])
    accepted = of_event(events[-1])
    assert accepted is not None
    assert accepted.accepted_per_position == tuple(stats["num_accepted_per_position"])


async def test_a_response_has_no_metrics_by_default(gate: Gate) -> None:
    for path in TEXT:
        assert "metrics" not in (await replies(gate, path))[0]


async def test_acceptance_of_several_answers_or_without_a_drafter_is_null(make_gate: MakeGate) -> None:
    gate = await make_gate({"per_request_spec_decode_metrics": "summary"})
    for fields in ({"n": 2}, {"betoken": {"off": True}}):
        (told,) = await replies(gate, "/v1/completions", **fields)
        assert told["metrics"] == {"speculative_decoding": None}
    (told,) = await replies(gate, "/v1/completions", prompt=["the", "a"])
    assert told["metrics"] == {"speculative_decoding": None}


async def test_acceptance_of_an_answer_that_drafted_nothing_is_zero(make_gate: MakeGate) -> None:
    gate = await make_gate({"per_request_spec_decode_metrics": "summary"})
    (told,) = await replies(gate, "/v1/completions", max_tokens=1)
    accepted = told["metrics"]["speculative_decoding"]
    assert (accepted["num_spec_steps"], accepted["acceptance_histogram"]) == (0, [0])
    assert (accepted["mean_acceptance_length"], accepted["draft_acceptance_rate"]) == (1.0, 0.0)


async def test_a_load_test_of_the_gateway_has_rounds_and_acceptance(make_gate: MakeGate) -> None:
    gate = await make_gate({"per_request_spec_decode_metrics": "summary"})
    endpoint = Endpoint(gate.url)
    served = await asyncio.to_thread(endpoint.served)
    assert served.is_betoken
    options = RequestOptions(served.model, 30, fields={"betoken": {"rounds": True, "num_draft_tokens": 4}})
    prompts = [Prompt(0, "the"), Prompt(1, "a", is_chat=True)]
    records = await asyncio.to_thread(
        run_closed, prompts, lambda record, begin: ask(endpoint, options, record, begin), 2
    )
    for record in records:
        assert not record.error and record.num_output_tokens == 30
        assert record.acceptance is not None and record.acceptance.num_drafts > 0
        assert sum(times["num_tokens"] for times in record.rounds) == 30
