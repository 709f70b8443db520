"""The gateway's log has the form of all services'."""

import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from betoken.common.logs import _Json
from tests.gateway.conftest import Gate


def test_log_lines_of_the_gateway_are_json_on_request() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "betoken.gateway", "--log-format", "json"]
        command += ["--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    assert [(line["level"], line["logger"]) for line in lines] == [("ERROR", "betoken.gateway")]
    assert lines[0]["message"].startswith("gateway cannot go on: ")


async def test_a_request_is_logged_with_its_fields(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "betoken.gateway")
    await gate.http.get("/version", headers={"x-request-id": "r-1"})
    (record,) = (record for record in caplog.records if record.getMessage() == "request ended")
    line = json.loads(_Json().format(record))
    assert {name: line[name] for name in ("request_id", "method", "path", "status")} == {
        "request_id": "r-1",
        "method": "GET",
        "path": "/version",
        "status": 200,
    }
    assert line["duration_s"] >= 0
