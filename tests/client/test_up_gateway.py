"""The gateway started by `up` together with the other services, which are `fake_service` here."""

import json
import re
import signal
import socket
import subprocess
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from betoken.cli import services, up_checks
from betoken.cli import up as up_module
from betoken.cli.main import app
from betoken.cli.up_checks import DEFAULT_HTTP_PORT, checked_http_port
from betoken.common.release import how_to_install
from tests.client.command import start
from tests.pipes import line_of

WIDE = {"COLUMNS": "200"}


def gateway_of(up: "subprocess.Popen[str]", logs: Path) -> tuple[dict[str, str], str]:
    """The options that the gateway was started with, and what `up` said."""
    assert line_of(up.stdout)
    up.send_signal(signal.SIGINT)
    _, said = up.communicate(timeout=60)
    assert up.returncode == 0, said
    line = (logs / "gateway.log").read_text().splitlines()[0]
    return json.loads(line.removeprefix("options ")), said


def test_up_starts_a_gateway_and_links_to_it(fake_modules: Path) -> None:
    arguments = ["up", "--target", "t", "--port", "0", "--log-directory", str(fake_modules), "--http-port", "0"]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told, said = gateway_of(up, fake_modules)
    (link,) = re.findall(r"open: (\S+)", said)
    assert link.startswith("http://127.0.0.1:") and not link.endswith(":0")
    assert told["router"] == re.findall(r"router +(\S+)", said)[0]


def test_up_takes_another_port_for_the_gateway_only_where_none_was_asked_for(fake_modules: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["up", "--target", "t", "--port", "0", "--http-port", str(port)], env=WIDE)
        assert result.exit_code == 2 and "--http-port" in result.stderr
        assert checked_http_port("127.0.0.1", None) in (0, DEFAULT_HTTP_PORT)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(up_checks, "DEFAULT_HTTP_PORT", port)
            assert checked_http_port("127.0.0.1", None) == 0


def test_up_goes_without_a_gateway_where_none_is_wanted_or_installed(fake_modules: Path) -> None:
    arguments = ["up", "--target", "t", "--port", "0", "--no-gateway", "--log-directory", str(fake_modules)]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert line_of(up.stdout)
    up.send_signal(signal.SIGINT)
    _, said = up.communicate(timeout=60)
    assert "open:" not in said and not (fake_modules / "gateway.log").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "GATEWAY_NEEDS", ("fastapi", "no_such_package"))
        said_on = Console(file=StringIO(), width=200)
        assert up_module._http_port("127.0.0.1", None, said_on) is None
        said = said_on.file.getvalue()
        assert "no_such_package" in said and how_to_install("gateway") in said
        with pytest.raises(typer.Exit):
            up_module._http_port("127.0.0.1", 0, said_on)
