"""`betoken demo` prints speeds if tokens are equal, and none if one differs."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from betoken.cli import demo
from betoken.cli.demo import Check, Demo, DemoOptions
from betoken.cli.report import TimedCompletion
from betoken.client import SpeculationStats, Token, TokenOrigin
from betoken.v1 import generation_pb2 as pb

OPTIONS = DemoOptions(target="t", prompt="a", drafter="ngram", repeats=2, max_new_tokens=3)
CHECKED = {"compared": 1, "failed": 0, "hardware": {"cores": 2}, "versions": {"torch": "2"}}


def result_of(own: bool, of_transformers: Check | None, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """The JSON object of a demo whose services answer at once, and the text that it shows."""

    @contextmanager
    def no_services(self: Demo) -> Iterator[None]:
        yield

    def answer(self: Demo, client: Any, is_drafted: bool) -> TimedCompletion:
        speculation = SpeculationStats.from_proto(pb.SpeculationStats(num_verify_forwards=2, num_emitted_tokens=5))
        ids = (1, 2 if own or is_drafted else 3)
        completion: Any = SimpleNamespace(output_ids=ids, tokens=ids, speculation=speculation)
        return TimedCompletion(completion, 0.5)

    monkeypatch.setattr(Demo, "_client", no_services)
    monkeypatch.setattr(Demo, "_show", lambda self, client: None)
    monkeypatch.setattr(Demo, "_answer", answer)
    monkeypatch.setattr(Demo, "_check_against_transformers", lambda self: of_transformers)
    shown = io.StringIO()
    return Demo(OPTIONS, Console(file=shown)).run(), shown.getvalue()


@pytest.mark.parametrize(("own", "target"), [(True, True), (False, True), (True, False)])
def test_the_demo_prints_no_speed_if_a_token_differs(own: bool, target: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    result, shown = result_of(own, Check(target, "" if target else "differs at 3"), monkeypatch)
    is_equal = own and target
    assert result["identical_to_target"] is is_equal
    assert (result["block_efficiency"], result["acceptance_rate"]) == (2.5, 0.0)
    assert ("tokens_per_s" in result, "autoregressive_tokens_per_s" in result) == (is_equal, is_equal)
    assert ("tokens/s" in shown, "no speeds" in shown) == (is_equal, not is_equal)
    assert ("differs at 3" in shown) is not target


def test_a_demo_without_the_comparison_names_only_its_own_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = result_of(True, None, monkeypatch)
    assert result["checked_against"] == {"own decoding without speculation, bfloat16": True}


@pytest.mark.parametrize(
    ("summary", "is_equal"),
    [(CHECKED, True), (CHECKED | {"failed": 1}, False), (CHECKED | {"compared": 0}, False)],
    ids=["equal", "different", "nothing compared"],
)
def test_the_comparison_of_a_demo_reads_the_last_line_of_the_benchmark(summary: dict[str, Any], is_equal: bool) -> None:
    check = demo._identity(f"a cell\n{json.dumps(summary)}\n", "")
    assert check.is_equal is is_equal and (check.detail == "") is is_equal
    assert check.conditions == {"hardware": {"cores": 2}, "versions": {"torch": "2"}}


def test_a_comparison_that_failed_is_a_difference_with_its_error() -> None:
    check = demo._identity("", "python -m betoken.bench.identity: no such model\n")
    assert not check.is_equal and check.detail.endswith(
        "did not finish: python -m betoken.bench.identity: no such model"
    )


def test_a_demo_outside_a_checkout_names_the_packages_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "IDENTITY_NEEDS", ("betoken.no_such_module",))
    shown = io.StringIO()
    assert Demo(OPTIONS, Console(file=shown))._check_against_transformers() is None
    assert "not compared with transformers: needs betoken.no_such_module" in shown.getvalue()


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


def test_the_prompt_of_a_demo_is_shown_above_both_completions() -> None:
    shown = io.StringIO()
    client: Any = SimpleNamespace(
        generate=lambda prompt, **how: Answer(), model_info=lambda: SimpleNamespace(sources=())
    )
    options = DemoOptions(prompt="def add(a, b):\n")
    Demo(options, Console(file=shown, force_terminal=False, width=80))._show(client)
    asked, _, completions = shown.getvalue().partition("with speculation")
    assert "def add(a, b):\n" in asked and "def add" not in completions
    assert completions.count("one") == 2 and "\x1b" not in shown.getvalue() and "␛[2J" in completions
