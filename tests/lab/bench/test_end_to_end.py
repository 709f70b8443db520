"""The end-to-end benchmark prints speeds if all tokens are equal, and none if one differs."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from betoken.bench import end_to_end, identity_check
from betoken.bench.baseline import PLAIN, BaselineRun
from betoken.bench.end_to_end_options import parse_options
from betoken.bench.prompts import Prompt
from betoken.cli.report import TimedCompletion
from betoken.client import Speculation, StepCost
from tests.lab.bench.made_up_runs import STATS

IDS = (5, 6, 7, 8)
OPTIONS = ["--target", "t", "--drafter", "ngram", "--limit", "3"]


class MadeUpStack:
    """Services that answer every prompt with the same ids; `drafted_ids` are those with speculation, in turn."""

    def __init__(self, drafted_ids: list[tuple[int, ...]]) -> None:
        self.client = self
        self._drafted_ids = drafted_ids
        self._num_drafted = 0

    async def __aenter__(self) -> MadeUpStack:
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Stop nothing."""

    async def model_info(self) -> Any:
        return SimpleNamespace(verify_workers=[SimpleNamespace(step_costs=[StepCost(1, 64, 0.002)])])

    async def fitting(self, prompts: list[Prompt], max_new_tokens: int) -> list[Prompt]:
        return prompts

    async def generate(self, client: Any, text: str, sampling: Any, speculation: Speculation) -> TimedCompletion:
        if speculation.off:
            return timed(text, IDS, 0.5)
        self._num_drafted += 1
        return timed(text, self._drafted_ids[self._num_drafted % len(self._drafted_ids)], 0.25)


class MadeUpTransformers:
    """`generate()` with different ids."""

    num_threads = {PLAIN: 1}

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = list(ids)

    def choose_num_threads(self, *arguments: object) -> dict[str, int]:
        return self.num_threads

    def generate(self, method: str, prompt: str, max_new_tokens: int, seed: int) -> BaselineRun:
        return BaselineRun(prompt_ids=[len(prompt)], ids=self._ids, seconds=1.0)

    def gap(self, prompt: str, position: int) -> float:
        return 0.5


def timed(text: str, ids: tuple[int, ...], seconds: float) -> TimedCompletion:
    completion: Any = SimpleNamespace(output_ids=ids, prompt_ids=(len(text),), speculation=STATS)
    return TimedCompletion(completion, seconds)


async def run(
    monkeypatch: pytest.MonkeyPatch, drafted_ids: list[tuple[int, ...]], theirs: tuple[int, ...], *arguments: str
) -> int:
    stack = MadeUpStack(drafted_ids)

    def baseline(*arguments: object) -> AbstractContextManager[MadeUpTransformers]:
        return nullcontext(MadeUpTransformers(theirs))

    async def top_two_gap(*arguments: object) -> float:
        return 0.5

    monkeypatch.setattr(end_to_end, "Stack", lambda config: stack)
    monkeypatch.setattr(end_to_end, "generate", stack.generate)
    monkeypatch.setattr(end_to_end, "Baseline", baseline)
    monkeypatch.setattr(identity_check, "top_two_gap", top_two_gap)
    return await end_to_end.run(parse_options([*OPTIONS, *arguments]))


async def test_end_to_end_prints_speeds_if_all_tokens_are_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dtype", "float32", "--concurrency", "2", "--repeats", "2"]
    assert await run(monkeypatch, [IDS], IDS, *arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Each prompt twice, with plain decoding and with `generate()`; and eight requests for two streams, twice.
    assert (result["identical"], result["compared"], result["num_prompts"]) == (28, 28, 3)
    assert result["tokens_per_s"] == {"betoken": 16.0, "betoken_off": 8.0, "transformers_generate": 4.0}
    assert result["concurrent_tokens_per_s"]["streams"] == 2 and result["target_step_ms"] == {"1": 2.0}


@pytest.mark.parametrize(
    ("drafted_ids", "theirs", "arguments"),
    [
        ([(*IDS, 9)], IDS, ["--no-transformers"]),
        ([IDS, IDS, (5, 6, 7, 9)], IDS, ["--no-transformers"]),
        ([*[IDS] * 5, (5, 6, 7, 9)], IDS, ["--limit", "1", "--concurrency", "2", "--no-transformers"]),
        ([IDS], (5, 6, 7, 9), ["--dtype", "float32"]),
        ([IDS, (5, 6, 7, 9)], IDS, ["--mode", "typical", "--temperature", "1", "--no-transformers"]),
    ],
    ids=["a token more", "one prompt", "beside another stream", "transformers", "a repetition"],
)
async def test_end_to_end_prints_no_speeds_if_a_token_differs(
    drafted_ids: list[tuple[int, ...]],
    theirs: tuple[int, ...],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await run(monkeypatch, drafted_ids, theirs, *arguments) == 1
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["identical"] < result["compared"] and "differs at output position" in printed
    assert "no speeds" in printed and "tokens/s" not in printed
    assert not {name for name in result if "per_s" in name or name.endswith("_ms")}


def test_an_attached_drafter_is_given_its_weights_and_fused_all_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = ["--medusa", "a/heads", "--eagle3", "a/layer"]
    for drafter, attached, given in (
        ("ngram@attached", ["ngram"], []),
        ("medusa", ["medusa"], ["--medusa", "a/heads"]),
        ("eagle3", ["eagle3"], ["--eagle3", "a/layer"]),
        ("fused@attached", ["fused", "ngram", "medusa", "eagle3"], weights),
    ):
        options = parse_options(["--target", "t", "--drafter", drafter, *weights])
        assert (options.attached_drafters, options.hosted_drafters) == (attached, [])
        assert options.verify_options[-len(given) or len(options.verify_options) :] == given
        assert options.as_json()["weights"] == {"medusa": "heads", "eagle3": "layer"}
    with pytest.raises(SystemExit):
        parse_options(["--target", "t", "--drafter", "fused@attached"])
    assert "needs --medusa or --eagle3" in capsys.readouterr().err
