"""lm-eval scores through the HTTP gateway as through its own backend: the same choices, and the same loglikelihoods."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig
from tests.e2e.lm_eval_child import ITEMS
from tests.e2e.pair import Pair
from tests.gateway.conftest import running_gateway

ROOT = Path(__file__).parents[2]
PER_TOKEN = 1e-4
"""Largest difference of a float32 logit by another order of its sums, as for near-ties; see docs/glossary.md."""


async def evaluated(backend: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """lm-eval's output."""
    command = [sys.executable, "-m", "tests.e2e.lm_eval_child", backend, json.dumps(arguments), str(folder)]
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate()
    assert child.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="no lm-eval")
async def test_scores_and_loglikelihoods_are_those_of_transformers(pair: Pair, tmp_path: Path) -> None:
    config = LocalServicesConfig(pair.target, pair.draft, dtype="float32", compile="off")
    async with Stack(config) as stack, running_gateway(None, stack.services.address) as gate:
        asked = {"model": "", "base_url": f"{gate.url}/v1/completions", "tokenizer": pair.target, "max_length": 1024}
        asked |= {"tokenizer_backend": "huggingface", "num_concurrent": 4, "batch_size": 3}
        ours = await evaluated("local-completions", asked, tmp_path)
    theirs = await evaluated("hf", {"pretrained": pair.target, "dtype": "float32", "device": "cpu"}, tmp_path)
    assert ours["score"] == theirs["score"]
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    for (question, choices, _), mine, other in zip(
        ITEMS, ours["loglikelihoods"], theirs["loglikelihoods"], strict=True
    ):
        for choice, (value, is_greedy), (expected, was_greedy) in zip(choices, mine, other, strict=True):
            num_tokens = len(tokenizer(question + choice).input_ids) - len(tokenizer(question).input_ids)
            assert math.isclose(value, expected, rel_tol=0, abs_tol=PER_TOKEN * max(1, num_tokens))
            assert is_greedy == was_greedy
