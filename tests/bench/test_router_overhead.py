"""The router's overhead is told only where its answers are right and its workers found nothing amiss."""

import json
from pathlib import Path

import psutil
import pytest

from foretoken.bench import router_overhead
from foretoken.bench.fake_model import FakeModel

TOKENIZER = str(Path(__file__).parents[2] / "models" / "target")
OPTIONS = ["--tokenizer", TOKENIZER, "--streams", "2", "--requests", "2", "--max-new-tokens", "8"]


def test_right_answers_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert router_overhead.main(OPTIONS) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["streams"]["2"]["tokens_per_s"] > 0


def test_no_figures_where_an_answer_is_not_the_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router_overhead, "FakeModel", lambda vocab_size: FakeModel(vocab_size - 1))
    assert router_overhead.main(OPTIONS) == 1
    printed = capsys.readouterr()
    assert "tokens_per_s" not in printed.out and "differs from the model's at output position 0" in printed.err


async def test_workers_that_do_not_end_well_are_a_failure(tmp_path: Path) -> None:
    left_by_other_tests = set(psutil.Process().children())
    with pytest.raises(RuntimeError, match="ended with status -9"):
        async with router_overhead.fake_workers(TOKENIZER, 0.0, tmp_path):
            (workers,) = set(psutil.Process().children()) - left_by_other_tests
            workers.kill()
