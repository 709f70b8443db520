"""The paired steps of a hybrid: reported with their ratio, rejected if a row in a batch differs from the row alone."""

import json
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig

from betoken.bench import block_step
from tests.engine.tiny import HYBRIDS

ARGUMENTS = ["--models", "gated-delta", "--pairs", "2", "--dtype", "float32", "--compile", "off"]


def small() -> Qwen3_5TextConfig:
    config: Qwen3_5TextConfig = HYBRIDS["qwen3_5"]()
    return config


def test_a_model_is_measured_in_pairs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(block_step.MODELS, "gated-delta", small)
    assert block_step.main(ARGUMENTS) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert result["num_pairs"] == 2 and result["low"] <= result["ratio"] <= result["high"]
    assert result["state_bytes"] > 0


def test_no_speed_of_a_model_whose_rows_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = block_step.Growing.step

    def off(self: Any, block: list[int], num_accepted: int) -> torch.Tensor:
        return step(self, block, num_accepted) + len(block)

    monkeypatch.setitem(block_step.MODELS, "gated-delta", small)
    monkeypatch.setattr(block_step.Growing, "step", off)
    assert block_step.main(ARGUMENTS) == 1
    assert "row 0 of 6 is not the row alone: no speed" in capsys.readouterr().out
