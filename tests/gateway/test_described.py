"""`/openapi.json`: made of the tables that bodies are read by, and true to what is answered."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from betoken.gateway.app import create_app
from betoken.gateway.chat import ChatBody
from betoken.gateway.completions import CompletionBody
from betoken.gateway.fim import FimBody
from betoken.gateway.infill import InfillBody, LlamaCompletionBody
from betoken.gateway.responses import ResponsesBody
from betoken.gateway.settings import GatewaySettings
from tests.gateway.conftest import Gate, MakeGate

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/infill": InfillBody,
    "/completion": LlamaCompletionBody,
    "/v1/fim/completions": FimBody,
}
MANY_FIELDS = ("/v1/chat/completions", "/v1/responses", "/infill", "/completion")
"""Paths whose fields are too many for the default run."""


@pytest.fixture
async def gate(make_gate: MakeGate) -> Gate:
    return await make_gate(
        verify_hellos=[{"supports_constraints": True}], draft_hellos=[{"predicting_drafters": ["ngram"]}]
    )


async def reported_by_schemathesis(gate: Gate, folder: Path, *options: str) -> str:
    """Its output; requests that are valid by the description may be rejected, as no schema expresses every rule."""
    (folder / "schemathesis.toml").write_text(
        '[[operations]]\ninclude-name = "GET /v1/models/{model}"\nparameters = { model = "fake" }\n'
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{gate.url}/openapi.json", "--no-color", "--seed", "1"),
        *("--exclude-checks", "positive_data_acceptance", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
    )
    out = (await asyncio.wait_for(process.communicate(), 240))[0].decode()
    assert process.returncode == 0, out
    await gate.cluster.until_idle()
    return out


async def test_responses_match_the_openapi_schema(gate: Gate, tmp_path: Path) -> None:
    most = [option for path in MANY_FIELDS for option in ("--exclude-path", path)]
    out = await reported_by_schemathesis(gate, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "3", *most)
    num, num_passed = map(int, re.findall(r"(\d+) generated, (\d+) passed", out)[0])
    assert num == num_passed > 500


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_very_many_responses_match_the_openapi_schema(gate: Gate, tmp_path: Path) -> None:
    await reported_by_schemathesis(gate, tmp_path, "--max-examples", "300")


@pytest.mark.parametrize("path", BODIES)
def test_the_openapi_schema_describes_every_field_as_it_is_read(path: str) -> None:
    description = create_app(None, GatewaySettings()).openapi()  # type: ignore[arg-type]
    body, operation = BODIES[path], description["paths"][path]["post"]
    assert set(operation["responses"]) == {"200", "4XX", "5XX"}
    schema = description["components"]["schemas"][body.__name__]
    fields = schema["properties"]
    assert fields.keys() == {*body.model_fields, *body.refused}
    for name, (_, neutral) in body.refused.items():
        assert fields[name]["enum"] == [*neutral, None] and fields[name]["description"]
    validator = Draft202012Validator(schema | {"components": description["components"]})
    least = {"input": "a"} if body is ResponsesBody else {"prompt": "a"}
    least = {"messages": [{"role": "user", "content": "a"}]} if body is ChatBody else least
    least = {"input_prefix": "a", "input_suffix": "b"} if body is InfillBody else least
    for name in fields.keys() - least.keys():
        assert validator.is_valid(least | {name: None}) and body.model_validate(least | {name: None}), name
    for name in least:
        assert not validator.is_valid(least | {name: None})
