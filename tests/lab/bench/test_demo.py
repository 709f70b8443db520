"""The demo prints speeds if tokens are equal, and none if one differs."""

import argparse
import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from betoken.bench import demo, identity_check
from betoken.bench.baseline import BaselineRun
from betoken.bench.demo import Demo
from betoken.bench.identity_check import Comparison, Outcome
from betoken.bench.streams import TimedCompletion
from betoken.client import SpeculationStats, Token, TokenOrigin
from betoken.v1 import generation_pb2 as pb

OPTIONS = argparse.Namespace(prompt="a", drafter="ngram", dtype="bfloat16", repeats=2, max_new_tokens=3)


@pytest.mark.parametrize(("own", "target"), [(True, True), (False, True), (True, False)])
def test_no_speed_where_a_token_differs(own: bool, target: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_services(self: Demo, dtype: str, compile: str) -> Iterator[str]:
        yield "localhost:1"

    def answer(self: Demo, client: Any, is_drafted: bool) -> TimedCompletion:
        speculation = SpeculationStats.from_proto(pb.SpeculationStats(num_verify_forwards=2, num_emitted_tokens=5))
        completion: Any = SimpleNamespace(output_ids=(1, 2 if own or is_drafted else 3), speculation=speculation)
        return TimedCompletion(completion, 0.5)

    compared = Comparison(Outcome.NEAR_TIE if target else Outcome.DIFFERENT)
    monkeypatch.setattr(Demo, "_services", no_services)
    monkeypatch.setattr(Demo, "_show", lambda self, client: None)
    monkeypatch.setattr(Demo, "_answer", answer)
    monkeypatch.setattr(Demo, "_check_against_transformers", lambda self: compared)
    shown = io.StringIO()
    result = Demo(OPTIONS, Console(file=shown)).run()
    is_equal = own and target
    assert result["identical_to_target"] is is_equal
    assert (result["block_efficiency"], result["acceptance_rate"]) == (2.5, 0.0)
    assert ("tokens_per_s" in result, "autoregressive_tokens_per_s" in result) == (is_equal, is_equal)
    assert ("tokens/s" in shown.getvalue(), "no speeds" in shown.getvalue()) == (is_equal, not is_equal)


class Answer:
    """Two tokens, the second of which would clear the screen."""

    tokens = (
        Token(5, TokenOrigin.RECOVERED, None, "one", None),
        Token(6, TokenOrigin.PLAIN, None, "\x1b[2J", None),
    )

    def __iter__(self) -> Iterator[Any]:
        yield SimpleNamespace(tokens=self.tokens)

    def result(self) -> Any:
        return SimpleNamespace(tokens=self.tokens)


def test_what_is_gone_on_from_stands_above_both_completions() -> None:
    shown = io.StringIO()
    client: Any = SimpleNamespace(
        generate=lambda prompt, **how: Answer(), model_info=lambda: SimpleNamespace(sources=())
    )
    options = argparse.Namespace(**vars(OPTIONS) | {"prompt": "def add(a, b):\n", "temperature": 0.0})
    Demo(options, Console(file=shown, force_terminal=False, width=80))._show(client)
    asked, _, completions = shown.getvalue().partition("with speculation")
    assert "def add(a, b):\n" in asked and "def add" not in completions
    assert completions.count("one") == 2 and "\x1b" not in shown.getvalue() and "␛[2J" in completions


@pytest.mark.parametrize(
    ("prompt_ids", "ids", "outcome"),
    [
        ([7], [1, 2, 3], Outcome.IDENTICAL),
        ([7], [1, 2, 4], Outcome.NEAR_TIE),
        ([7], [1, 2], Outcome.DIFFERENT),
        ([8], [1, 2, 3], Outcome.DIFFERENT),
    ],
    ids=["the same", "another token", "ended before", "another prompt"],
)
def test_a_tie_excuses_another_token_and_nothing_else(
    prompt_ids: list[int], ids: list[int], outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*arguments: object) -> Any:
        return SimpleNamespace(completion=SimpleNamespace(prompt_ids=(7,), output_ids=(1, 2, 3)))

    async def tie(*arguments: object) -> float:
        return 1e-5

    monkeypatch.setattr(demo, "generate", answer)
    monkeypatch.setattr(identity_check, "top_two_gap", tie)
    baseline: Any = SimpleNamespace(
        generate=lambda *arguments: BaselineRun(prompt_ids, ids, 1.0), gap=lambda *arguments: 1e-5
    )
    compared = asyncio.run(Demo(OPTIONS, Console(file=io.StringIO()))._compare("localhost:1", baseline))
    assert compared.outcome is outcome
