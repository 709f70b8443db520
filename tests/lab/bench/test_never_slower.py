"""The never-slower table: every cell gets the same pairs, and noise is printed as undecided."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from betoken.bench import never_slower
from betoken.bench.matrix import NO_DRAFTER
from betoken.bench.never_slower import DEFAULT, Cell, NeverSlower, markdown, parse_options, rows
from betoken.bench.prompts import Prompt

ONE, MANY = Cell(1, "burst", 0.0), Cell(16, "burst", 0.0)


def options(*more: str) -> argparse.Namespace:
    return parse_options(["--target", "t", "--draft", "d", "--minutes", "0.0001", *more])


def bench(monkeypatch: pytest.MonkeyPatch, wrong: str = "") -> NeverSlower:
    async def generate(client: Any, prompt: str, sampling: Any, speculation: Any) -> Any:
        is_wrong = speculation.drafter == wrong
        policy = SimpleNamespace(expected_speedup=1.25) if speculation.drafter == "model" else None
        stats = SimpleNamespace(policy=policy)
        completion = SimpleNamespace(output_ids=[sampling.seed, is_wrong], speculation=stats)
        return SimpleNamespace(completion=completion, seconds=0.5)

    monkeypatch.setattr(never_slower, "generate", generate)
    small = options("--streams", "1", "4", "--drafters", DEFAULT, "model", "--temperatures", "0")
    small.minutes = 0.002
    return NeverSlower(small, None, [Prompt(0, "a"), Prompt(1, "b")])  # type: ignore[arg-type]


async def test_each_cell_pairs_every_drafter_with_decoding_without_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(monkeypatch)
    await run.run()
    assert {name for _, name in run.ratios} == {DEFAULT, "model"}
    assert len({cell for cell, _ in run.ratios}) == 4
    assert {row["drafter"]: row["predicted"] for row in rows(run.ratios, run.answers, run.predicted, 0.98)} == {
        DEFAULT: None,
        "model": 1.25,
    }
    assert not run.differences and NO_DRAFTER not in {name for _, name in run.ratios}


async def test_an_answer_that_differs_is_reported_with_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(monkeypatch, wrong="model")
    await run.run()
    assert "model, 1 streams, burst, T = 0" in run.differences


def test_a_noisy_cell_is_undecided_and_the_others_are_decided() -> None:
    ratios = {(ONE, "model"): [0.6, 1.6] * 10, (ONE, "ngram"): [1.2, 1.3] * 10, (MANY, "model"): [0.8, 0.82] * 10}
    table = {(row["num_streams"], row["drafter"]): row["verdict"] for row in rows(ratios, ratios, {}, 0.98)}
    assert table == {(1, "model"): "undecided", (1, "ngram"): ">= 0.98", (16, "model"): "below 0.98"}


def test_the_table_prints_each_row_with_its_interval() -> None:
    cell = MANY, DEFAULT
    text = markdown(rows({cell: [1.0] * 15}, {cell: [1.25] * 15}, {cell: [1.0, 1.1]}, 0.98))
    assert "| 16 | burst | 0 | `default` | 1.000 | [1.000, 1.000] | 1.250 | 1.05 | 15 | >= 0.98 |" in text


def test_the_never_slower_services_attach_ngrams_and_hold_all_streams() -> None:
    config = never_slower.services(options("--streams", "1", "128"))
    assert config.attached_drafters == ["ngram"] and config.draft == "d"
    assert config.verify_options[-1] == config.draft_options[-1] == "128"
