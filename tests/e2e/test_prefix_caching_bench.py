"""The benchmark of prefix caching through real processes; no times if an answer differs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from betoken.bench import prefix_caching
from betoken.bench.prefix_caching import parse_options, report
from tests.e2e.pair import Pair


async def test_the_prefix_caching_benchmark_finds_earlier_turns_cached(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(prefix_caching, "report", lambda *args: told.append(args) or report(*args))
    command = ["--target", pair.target, "--draft", pair.draft, "--compile", "off"]
    command += ["--limit", "2", "--turns", "2", "--max-new-tokens", "16"]
    assert await prefix_caching.run(parse_options(command)) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second = result["turns"]
    assert result["options"]["target"] == Path(pair.target).name and result["options"]["turns"] == 2
    assert (result["identical"], result["compared"], first["conversations"]) == (4, 4, 2)
    assert second["cached_prompt_tokens"] > first["prompt_tokens"]
    assert second["time_to_first_token_ms"].keys() == {"with", "without"}

    answers, options = told[0]
    answers[True][1][1] = replace(answers[True][1][1], tokens=())
    changed = report(answers, options)
    assert (changed["identical"], changed["compared"]) == (3, 4) and "turns" not in changed
