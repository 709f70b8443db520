"""Answers to programming problems are run with the problem's tests."""

import json
from pathlib import Path

import pytest

from betoken.bench.rivals.pass_rate import load_problems, passes, program, solve
from betoken.bench.rivals.servers import Answer

PROBLEM = {
    "task_id": "T/0",
    "prompt": 'from typing import List\n\n\ndef twice(xs: List[int]) -> List[int]:\n    """Doubles."""\n',
    "test": "def check(f):\n    assert f([1, 2]) == [2, 4]\n",
    "entry_point": "twice",
}
RIGHT = "Sure:\n```python\ndef twice(xs: List[int]) -> List[int]:\n    return [2 * x for x in xs]\n```\nDone."


def test_a_right_answer_passes_and_a_wrong_one_does_not() -> None:
    assert passes(program(PROBLEM, RIGHT))
    assert not passes(program(PROBLEM, RIGHT.replace("2 *", "3 *")))
    assert not passes(program(PROBLEM, "I cannot."))


def test_a_run_that_was_interrupted_asks_for_missing_answers_only(tmp_path: Path) -> None:
    asked: list[str] = []

    def side(prompt: str) -> Answer:
        asked.append(prompt)
        return Answer(RIGHT, 20)

    for _ in range(2):
        (row,) = solve("ours", side, [PROBLEM], tmp_path / "results.jsonl")
    assert row["passes"] and len(asked) == 1
    solve("theirs", side, [PROBLEM], tmp_path / "results.jsonl")
    assert len(asked) == 2


def test_problems_are_taken_from_the_whole_file_and_need_tests(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(PROBLEM | {"task_id": f"T/{index}"}) + "\n" for index in range(4)))
    assert [problem["task_id"] for problem in load_problems(path, 2)] == ["T/0", "T/2"]
    path.write_text(json.dumps({"task_id": "T/0", "prompt": ""}))
    with pytest.raises(ValueError, match="no entry_point"):
        load_problems(path, 2)
