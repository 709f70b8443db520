"""The router's overhead is reported only if its answers are right and its workers found no fault."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from betoken.bench import router_overhead
from betoken.cli.service_process import ServiceFailedError, ServiceProcess
from betoken.client import InvalidArgumentError
from betoken.testing.fake_model import FakeModel

TOKENIZER = str(Path(__file__).parents[3] / "models" / "target")
OPTIONS = ["--tokenizer", TOKENIZER, "--streams", "2", "--requests", "2", "--max-new-tokens", "8"]


def test_router_overhead_times_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert router_overhead.main(OPTIONS) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["streams"]["2"]["tokens_per_s"] > 0


def test_no_python_runs_in_the_child_that_becomes_a_service(tmp_path: Path) -> None:
    """Between fork and exec hooks and the garbage collector would meet what belongs to threads the child lacks."""
    code = (
        "import os, pathlib, sys\n"
        "from betoken.bench import router_overhead\n"
        f"os.register_at_fork(after_in_child=pathlib.Path({str(tmp_path / 'hook ran')!r}).touch)\n"
        "sys.exit(router_overhead.main(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *OPTIONS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_router_overhead_has_no_figures_if_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router_overhead, "FakeModel", lambda vocab_size: FakeModel(vocab_size - 1))
    assert router_overhead.main(OPTIONS) == 1
    printed = capsys.readouterr()
    assert "tokens_per_s" not in printed.out and "differs from the model's at output position 0" in printed.err


@pytest.mark.parametrize(
    "error",
    [InvalidArgumentError("speculation.num_draft_tokens", 99, "must be 1 to 16"), ServiceFailedError("router", "", "")],
)
def test_what_the_services_refuse_is_no_failed_comparison(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refused(options: object) -> None:
        raise error

    monkeypatch.setattr(router_overhead, "run", refused)
    assert router_overhead.main(OPTIONS) == 2
    assert capsys.readouterr().err == f"python -m betoken.bench.router_overhead: {error}\n"


async def test_workers_without_a_tokenizer_do_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServiceFailedError, match="ended with status 2"):
        async with router_overhead.fake_workers(str(tmp_path), 0.0, tmp_path):
            pass
    assert "Traceback" not in capfd.readouterr().err


async def test_services_that_start_too_late_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_overhead, "READY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(router_overhead, "READY_FILE", "never")  # in time they would be if this process paused
    monkeypatch.setattr(ServiceProcess, "is_ready", lambda service: False)
    with pytest.raises(ServiceFailedError, match="the fake workers did not come to serve within 0 s"):
        async with router_overhead.fake_workers(TOKENIZER, 0.0, tmp_path):
            pass
    with pytest.raises(ServiceFailedError, match="router did not come to serve within 0 s"):
        async with router_overhead.router(TOKENIZER, tmp_path):
            pass


async def test_workers_that_do_not_end_well_are_a_failure(tmp_path: Path) -> None:
    left_by_other_tests = set(psutil.Process().children())
    with pytest.raises(RuntimeError, match="ended with status -9"):
        async with router_overhead.fake_workers(TOKENIZER, 0.0, tmp_path):
            (workers,) = set(psutil.Process().children()) - left_by_other_tests
            workers.kill()
