"""`betoken up` with tiny services: starts, restarts, stops and reports them."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from betoken.cli.service_process import Progress
from betoken.cli.starting import shown_progress
from tests.client.command import lines_until, run, start
from tests.pipes import line_of


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_up_serves_until_interrupted(fake_modules: Path, interruption: signal.Signals) -> None:
    arguments = ["up", "--target", "t", "--port", "0", "--log-directory", str(fake_modules), "--verify-options=--held"]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert lines_until(up.stderr, "verify: warming up (50%)")
    (fake_modules / "go").touch()
    address = line_of(up.stdout).strip()
    assert run("info", "--address", address).exit_code == 0
    up.send_signal(interruption)
    _, errors = up.communicate(timeout=60)
    assert up.returncode == 0
    assert f"router    {address}" in errors
    with pytest.raises(grpc.FutureTimeoutError), grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(0.2)


@pytest.mark.parametrize("is_up", [False, True])
def test_up_leaves_nothing_behind_however_often_it_is_interrupted(
    fake_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    stubborn = [f"--{role}-options=--stubborn" for role in ("verify", "draft", "router")]
    up = start(["up", "--target", "t", "--port", "0", *stubborn], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line_of(up.stdout if is_up else up.stderr)
    deadline_s = time.monotonic() + 120
    while up.poll() is None:
        assert time.monotonic() < deadline_s, "it does not end"
        up.send_signal(signal.SIGINT)
        time.sleep(0.01)
    up.communicate(timeout=60)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_up_stops_all_services_in_order_when_its_output_is_not_read(
    fake_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: signal.Signals
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    up = start(["up", "--target", "t", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line_of(up.stdout)
    up.stderr.close()  # as of a `tee` that the same Ctrl-C has ended, or of a terminal that was closed
    up.send_signal(interruption)
    status = up.wait(60)
    assert (list((tmp_path / "temporary").iterdir()), status) == ([], 0)


def pid_of(directory: Path, name: str) -> int:
    return int(json.loads((directory / f"{name}.ready").read_text())["pid"])


def test_up_restarts_any_ended_service(fake_modules: Path) -> None:
    arguments = ["up", "--target", "t", "--drafters", "ngram", "--port", "0", "--num-verify-workers", "2"]
    up = start([*arguments, "--log-directory", str(fake_modules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    address = line_of(up.stdout).strip()
    for name in ("draft", "verify-2", "router"):
        os.kill(pid_of(fake_modules, name), signal.SIGKILL)
        lines = lines_until(up.stderr, f"{name} serves again")
        assert any(f"{name} was ended by SIGKILL" in line for line in lines), lines
        assert str(pid_of(fake_modules, name)) in lines[-1]
    assert run("info", "--address", address).exit_code == 0
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 0


def test_up_continues_without_a_stopped_service_while_there_is_a_verify_worker(fake_modules: Path) -> None:
    polite = [f"--{role}-options=--polite" for role in ("verify", "draft")]
    options = ["--drafters", "ngram", "--num-verify-workers", "2", *polite]
    arguments = ["up", "--target", "t", "--port", "0", *options]
    up = start([*arguments, "--log-directory", str(fake_modules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line_of(up.stdout)
    for name in ("draft", "verify-1", "verify-2"):
        os.kill(pid_of(fake_modules, name), signal.SIGTERM)
        lines_until(up.stderr, f"{name} was stopped: it is not started again")
    lines_until(up.stderr, "stopping")
    up.communicate(timeout=60)
    assert up.returncode == 1


def test_up_reports_why_a_service_does_not_start(fake_modules: Path) -> None:
    up = start(["up", "--target", "t", "--port", "0", "--verify-options", "--fail"], stderr=subprocess.PIPE)
    _, errors = up.communicate(timeout=60)
    assert up.returncode == 1 and "verify ended with exit status 1" in errors and "the weights are missing" in errors


@pytest.mark.parametrize(
    ("options", "option", "reported"),
    [
        ("--drafters model", "--drafters", "model: needs a draft model"),
        ("--drafters staged", "--drafters", "staged: needs a draft model"),
        ("--drafters model,ngram,staged", "--drafters", "model, staged: needs a draft model"),
        ("--drafters fused,ngram", "--drafters", "fused: chooses among others"),
        ("--draft d --drafters ngram", "--draft", "none of the drafters uses it"),
        ("--draft d --lookahead-model l --drafters lookahead", "--draft", "none of the drafters uses it"),
        ("--lookahead-model l", "--lookahead-model", "only `lookahead` uses it, which --drafters does not name"),
        ("--medusa m", "--medusa", "only `medusa` uses it, which --attached-drafters does not name"),
        ("--drafters nope", "--drafters", "'nope': must be among fused, model"),
        ("--drafters medusa", "--drafters", "'medusa': runs on verify workers only: name it in --attached-drafters"),
        ("--draft no/such/draft.gguf", "--draft", "no/such/draft.gguf: no such file or directory"),
    ],
)
def test_up_starts_all_requested_services_or_none(options: str, option: str, reported: str) -> None:
    result = run("up", "--target", "t", "--port", "0", *options.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"for {option}" in result.stderr and reported in result.stderr


def test_up_reports_why_the_router_rejects_a_worker(fake_modules: Path) -> None:
    options = ["--drafters", "ngram", "--router-options", "--remark 'drafts short texts only'"]
    arguments = ["up", "--target", "t", "--port", "0", *options]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines_until(up.stderr, "draft drafts short texts only")
    line_of(up.stdout)
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)


def test_up_serves_on_a_unix_socket_and_leaves_logs_only(fake_modules: Path) -> None:
    socket, logs = fake_modules / "router.sock", fake_modules / "logs"
    arguments = ["up", "--target", "t", "--host", f"unix:{socket}", "--log-directory", str(logs)]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert line_of(up.stdout).strip() == f"unix:{socket}"
    assert run("info", "--address", f"unix:{socket}").exit_code == 0
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 0
    assert {file.suffix for file in logs.iterdir()} <= {".log", ".sock"}


def test_progress_without_a_terminal_is_a_line_for_each_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(Console()) as show:
        for fraction in (0.2, 0.201, 0.204, 0.21):
            show("verify", Progress("packing weights", fraction))
    assert capsys.readouterr().out.split("\n") == ["verify: packing weights (20%)", "verify: packing weights (21%)", ""]
