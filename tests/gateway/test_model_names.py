"""Names of the model at the gateway: requests, responses and lists."""

from __future__ import annotations

import json

import pytest

from tests.gateway.conftest import Gate, MakeGate

CHAT = [{"role": "user", "content": "hi"}]
NAMES = ("coder", "gpt-4o")


@pytest.fixture
async def named(make_gate: MakeGate) -> Gate:
    return await make_gate({"served_model_name": NAMES})


@pytest.mark.parametrize("name", ["coder", "gpt-4o", None])
async def test_a_request_by_a_served_model_name_is_answered_under_the_first(named: Gate, name: str | None) -> None:
    body = {"model": name, "messages": CHAT, "max_tokens": 2}
    assert (await named.post("/v1/chat/completions", body)).json()["model"] == "coder"
    response = await named.post("/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 2})
    assert response.json()["model"] == "coder"


async def test_events_have_the_first_served_model_name(named: Gate) -> None:
    body = {"model": "gpt-4o", "prompt": "a", "max_tokens": 2, "stream": True}
    lines = (await named.post("/v1/completions", body)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {event["model"] for event in events} == {"coder"}


async def test_served_model_names_are_listed_and_others_are_not_served(named: Gate, make_gate: MakeGate) -> None:
    own = (await (await make_gate()).http.get("/v1/models")).json()["data"][0]["id"]
    assert [model["id"] for model in (await named.http.get("/v1/models")).json()["data"]] == list(NAMES)
    for name in (*NAMES, own):
        assert (await named.http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await named.post("/tokenize", {"model": name, "prompt": "a"})).status_code == 200
    for response in (
        await named.http.get("/v1/models/other"),
        await named.post("/tokenize", {"model": "other", "prompt": "a"}),
        await named.post("/v1/completions", {"model": "other", "prompt": "a"}),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
