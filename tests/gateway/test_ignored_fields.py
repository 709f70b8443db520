"""`--ignore-unknown-fields`: which fields are ignored, and how the response names them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Gate, MakeGate

UNKNOWN: dict[str, Any] = {"num_ctx": 4096, "cache_prompt": True}
COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 2}


@pytest.fixture
async def lenient(make_gate: MakeGate) -> Gate:
    return await make_gate({"ignore_unknown_fields": True})


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_ignored_and_named_in_a_warning(lenient: Gate, stream: bool) -> None:
    response = await lenient.post("/v1/completions", COMPLETION | UNKNOWN | {"stream": stream})
    assert response.status_code == 200
    assert response.headers["warning"] == '299 betoken "ignored unknown fields: cache_prompt, num_ctx"'


async def test_unknown_fields_are_rejected_by_default(gate: Gate) -> None:
    response = await gate.post("/v1/completions", COMPLETION | UNKNOWN)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_prompt")
    assert "warning" not in (await gate.post("/v1/completions", COMPLETION)).headers


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"prompt_logprobs": 1}, {"betoken": {"wishes": 3}}])
async def test_known_and_nested_fields_are_still_rejected_when_unknown_ones_are_ignored(
    lenient: Gate, wrong: dict[str, Any]
) -> None:
    response = await lenient.post("/v1/completions", COMPLETION | UNKNOWN | wrong)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(next(iter(wrong)))
    assert "num_ctx" in response.headers["warning"]


async def test_a_warning_names_a_bounded_number_of_ignored_fields_as_safe_text(lenient: Gate) -> None:
    unknown = {f"x{index:03}": 1 for index in range(30)} | {'a"\r\n\u00e9' + "b" * 200: 1}
    warning = (await lenient.post("/tokenize", {"prompt": "a"} | unknown)).headers["warning"]
    assert warning.startswith('299 betoken "ignored unknown fields: a????bbb') and warning.endswith('x014 and 15 more"')
    assert len(warning) < 300
