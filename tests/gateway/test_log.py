"""The gateway's log has the form of all services'."""

import json
import os
import socket
import subprocess
import sys


def test_lines_are_objects_where_that_is_asked_for() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "betoken.gateway", "--log-format", "json"]
        command += ["--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    assert [(line["level"], line["logger"]) for line in lines] == [("ERROR", "betoken.gateway")]
    assert lines[0]["message"].startswith("gateway cannot go on: ")
