"""`betoken doctor`: a table or one JSON object, and an exit status that says whether there is an error."""

import json
import socket
from pathlib import Path

import pytest

from tests.client.command import run

MODELS = Path(__file__).parents[2] / "models"
PAIR = ["--model", str(MODELS / "target"), "--draft", str(MODELS / "draft")]
ON_CPU = ["--device", "cpu", "--timeout-s", "120"]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_doctor_checks_two_ranks_on_this_machine(port: int) -> None:
    options = [*PAIR, *ON_CPU, "--tensor-parallel", "2", "--ports", str(port), "--json"]
    result = run("doctor", *options)
    report = json.loads(result.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (result.exit_code, report["ok"]) == (0, True), report
    assert {"python", "packages", "ports", "fast wake", "devices", "code cache", "model", "draft model"} <= set(found)
    assert "gloo: 1 MiB in" in found["gather of 2 ranks"]["found"]
    assert "2 ranks of" in found["memory"]["found"]
    assert all(bool(finding["cure"]) == (finding["level"] != "ok") for finding in report["findings"])


def test_doctor_checks_two_stages_of_which_this_machine_has_one() -> None:
    options = ["--pipeline", "2", "--local-ranks", "1", "--rendezvous", "127.0.0.1:1", "--ports", "", "--json"]
    report = json.loads(run("doctor", *PAIR[:2], *ON_CPU, *options).stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert "1 rank of " in found["memory"]["found"]
    assert found["rendezvous"]["level"] == "error" and "loopback" in found["rendezvous"]["found"]
    width = json.loads((MODELS / "target" / "config.json").read_text())["hidden_size"]
    assert f"gloo on this machine: 1 token, {2 * width:,} bytes, in " in found["hidden states of 2 stages"]["found"]


def test_doctor_exits_with_status_1_and_shows_the_cure_of_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = run("doctor", *ON_CPU, "--ports", str(port), env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert f"{port}: Address already in use" in result.stdout and "cure: end the process" in result.stdout
    assert "1 error," in result.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ports", "80,x"),
        ("--ports", "70000"),
        ("--rendezvous", "host"),
        ("--dtype", "int3"),
        ("--device", "tpu"),
        ("--tensor-parallel", "0"),
        ("--pipeline", "0"),
        ("--local-ranks", "2"),
    ],
)
def test_doctor_rejects_a_bad_value_with_its_option(option: str, value: str) -> None:
    result = run("doctor", option, value)
    assert result.exit_code == 2 and option in result.output
