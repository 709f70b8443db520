"""Overlapped against synchronous rounds: every side answers every prompt, and no speed without equal answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from betoken.bench import overlapped_rounds
from betoken.bench.overlapped_rounds import PLAIN, SYNCHRONOUS, answers, markdown, parse_options
from betoken.bench.prompts import Prompt

PROMPTS = [Prompt(number, f"prompt {number}") for number in range(3)]
OPTIONS = parse_options(["--target", "t", "--draft", "d", "--fan-out", "1", "3"])


def answering(monkeypatch: pytest.MonkeyPatch, wrong: object = None) -> tuple[dict[Any, Any], list[tuple[Any, str]]]:
    asked: list[tuple[Any, str]] = []

    async def generate(client: Any, prompt: str, sampling: Any, speculation: Any) -> Any:
        asked.append((client, prompt))
        return SimpleNamespace(completion=SimpleNamespace(output_ids=[sampling.seed, client == wrong]))

    monkeypatch.setattr(overlapped_rounds, "generate", generate)
    return {name: name for name in (PLAIN, SYNCHRONOUS, 1, 3)}, asked


async def test_sides_answer_each_prompt_in_rotating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, asked = answering(monkeypatch)
    found = await answers(clients, PROMPTS, 0.8, OPTIONS)
    assert [len(one) for one in found.values()] == [3, 3, 3, 3]
    assert [name for name, _ in asked[::4]] == [PLAIN, SYNCHRONOUS, 1]


@pytest.mark.parametrize("wrong", [PLAIN, SYNCHRONOUS, 3])
async def test_an_overlapped_answer_that_differs_prints_no_speed(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    clients, _ = answering(monkeypatch, wrong)
    with pytest.raises(ValueError, match="answers to prompt 0 differ at T = 0.8"):
        await answers(clients, PROMPTS, 0.8, OPTIONS)


def test_the_overlap_table_has_the_prediction_beside_the_measurement() -> None:
    row = {"temperature": 0.8, "fan_out": 3, "hit_rate": 0.889, "over_synchronous": 1.426, "low": 1.29, "high": 1.58}
    text = markdown([row | {"predicted": 1.387, "speedup": 2.46}])
    assert "| 0.8 | 3 | 0.89 | 1.43 | [1.29, 1.58] | 1.39 | 2.46 |" in text
