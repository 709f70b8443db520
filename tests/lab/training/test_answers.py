from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.training.answers import cycled_params, write_answers
from betoken.training.samples import read_prompts


@pytest.fixture(scope="module")
def runner(tiny_pair: Path) -> ModelRunner:
    return load_runner(EngineConfig(str(tiny_pair / "target"), compile="off", self_check=False, num_pages=24))


@pytest.fixture(scope="module")
def prompts(tiny_pair: Path) -> list[list[int]]:
    return read_prompts(tiny_pair / "prompts.jsonl", AutoTokenizer.from_pretrained(tiny_pair / "target"), 12)


def params(runner: ModelRunner) -> Any:
    return cycled_params(runner, [0.0, 1.0], max_new_tokens=12, seed=3)


def test_an_answer_does_not_depend_on_those_beside_it(
    runner: ModelRunner, prompts: list[list[int]], tmp_path: Path
) -> None:
    together = write_answers(lambda: runner, prompts, params, tmp_path / "together.jsonl")
    assert [sample.ids[: sample.prompt_length] for sample in together] == [tuple(prompt) for prompt in prompts]
    for index in (0, 5):
        alone = write_answers(
            lambda: runner,
            [prompts[index]],
            lambda runner, index=index: lambda _: params(runner)(index),
            tmp_path / f"alone{index}.jsonl",
        )
        assert alone == [together[index]]
    assert runner.page_table.num_free == runner.page_table.num_pages


def test_answers_cut_off_are_gone_on_with(runner: ModelRunner, prompts: list[list[int]], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write_answers(lambda: runner, prompts, params, path)
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:20])
    write_answers(lambda: runner, prompts, params, path)
    assert path.read_text() == whole


def test_finished_answers_need_no_model(runner: ModelRunner, prompts: list[list[int]], tmp_path: Path) -> None:
    first = write_answers(lambda: runner, prompts, params, tmp_path / "answers.jsonl")

    def refuse() -> ModelRunner:
        raise AssertionError("the model was loaded")

    assert write_answers(refuse, prompts, params, tmp_path / "answers.jsonl") == first
