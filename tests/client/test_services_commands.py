"""The commands that replace themselves by a service, and their errors without an extra."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from betoken.cli import services
from betoken.client.channel import DEFAULT_ADDRESS
from betoken.common.release import how_to_install
from betoken.router.settings import RouterSettings
from tests.client.command import run

ROOT = Path(__file__).parents[2]


def test_service_commands_are_replaced_by_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *everything: executed.append(everything))
    services.become("betoken.router", ["--help"], extra="router", needs=())
    program, arguments, environment = executed[0]
    assert program == sys.executable and arguments[1:] == ["-m", "betoken.router", "--help"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GRPC_EXPERIMENTS"] == "-event_engine_client,-event_engine_listener"
    with pytest.raises(typer.Exit):
        services.become("betoken.router", [], extra="router", needs=("no_such_package",))


def test_a_service_imports_nothing_outside_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(services, "become", lambda module, arguments, **options: asked.append(options))
    for command in ("router", "draft-worker", "verify-worker"):
        assert run(command).exit_code == 0
    assert [options["extra"] for options in asked] == ["router", "router", "worker"], "n-grams need no torch"
    for options in asked:
        installed = {re.split(r"[>=;]", line)[0].replace("-", "_") for line in extras[options["extra"]]}
        code, *packages = options["needs"]
        assert importlib.util.find_spec(code) and installed.issuperset(packages), options


def test_a_router_with_default_options_is_found_by_default_clients() -> None:
    assert DEFAULT_ADDRESS == f"127.0.0.1:{RouterSettings.model_fields['port'].default}"


def test_every_argument_of_a_service_command_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(services, "become", lambda module, arguments, **_: became.append([module, *arguments]))
    for command, module in (("router", "router"), ("draft-worker", "draft_worker"), ("verify-worker", "verify_worker")):
        assert run(command, "--model", "x", "--help", "y").exit_code == 0
        assert became.pop() == [f"betoken.{module}", "--model", "x", "--help", "y"]


def test_a_router_without_tls_is_reported_in_one_line(router) -> None:
    command = [sys.executable, "-m", "betoken.cli", "info", "--tls", "--address", router.address, "--timeout-s", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("betoken: ")


def test_a_command_without_its_extra_says_so_in_one_line() -> None:
    code = "import sys\nsys.modules['typer'] = None\nsys.argv[1:] = ['router', '--help']\n"
    code += "from betoken.cli.__main__ import main\nraise SystemExit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    reported = (
        "betoken: the command needs typer: in a checkout of Betoken, pip install -c constraints.txt -e '.[cli]'\n"
    )
    assert (done.returncode, done.stderr) == (1, reported)


def test_an_interrupt_during_imports_of_a_command_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from betoken.cli.__main__ import main\nraise SystemExit(main())"
    roots = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": roots}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


def test_the_sdk_without_the_services_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "betoken." in name else find_spec(name))
    result = run("verify-worker", "--model", "t")
    assert result.exit_code == 1
    assert result.stderr == f"betoken: verify-worker needs betoken.verify_worker: {how_to_install('worker')}\n"


@pytest.mark.parametrize("extra", ["cli", "router", "worker", "router,worker"])
def test_hints_on_installing_name_a_part_of_this_project(extra: str) -> None:
    """By its name alone pip would search the package index, which may hold another project of that name."""
    hint = how_to_install(extra)
    assert hint.startswith("in a checkout of Betoken, pip install ") and f" -e '.[{extra}]'" in hint
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() >= set(extra.split(","))
    assert (ROOT / "constraints.txt").is_file()
