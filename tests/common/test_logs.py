"""The log's two formats, in a separate process: peer-controlled text begins no line and moves no cursor."""

import json
import os
import re
import subprocess
import sys

import pytest

from betoken.common.logs import MAX_CHARS, escaped

EVIL = "w\x1b[2J\r\nforged\x9b1m\u2028\u202e\x00"
PROGRAM = """
import asyncio, ctypes, logging, socket, sys, threading
import grpc
from betoken.common.logs import fields
from betoken.rpc.server import run_service
from betoken.rpc.settings import ServiceSettings

EVIL = sys.argv.pop().encode().decode("unicode_escape")
DEBUG_DATA = EVIL.encode() + b"\\nI1127 09:33:07.534654   22973 x.cc:1] forged " + b"y" * 5000

def say_goaway(server):
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # SETTINGS
    payload = bytes(4) + (2).to_bytes(4, "big") + DEBUG_DATA
    connection.sendall(len(payload).to_bytes(3, "big") + bytes([7, 0, 0, 0, 0, 0]) + payload)
    connection.recv(65536)

async def body():
    log = logging.getLogger("betoken.example")
    log.info("worker %s is up", EVIL, extra=fields(tenant=EVIL, count=3))
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("failed")
    sys.stderr.write("by Python\\n")
    sys.stderr.flush()
    ctypes.CDLL(None).write(2, b"by C\\n", 5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=say_goaway, args=(server,), daemon=True).start()
        async with grpc.aio.insecure_channel("127.0.0.1:%d" % server.getsockname()[1]) as channel:
            try:
                await channel.unary_unary("/a/b")(b"", timeout=1.0)
            except grpc.RpcError:
                pass
    raise RuntimeError(EVIL)

sys.exit(run_service("example", ServiceSettings.parse(sys.argv[1:]), body))
"""
ABORTED = """
import ctypes, sys
from betoken.common.logs import configure_logging
configure_logging("info", "json", captures_stderr=True)
library = ctypes.PyDLL(None)  # it keeps the interpreter's lock: no thread of Python's runs any more
library.write(2, b"last words\\n", 11)
library.abort()
"""


def run(*arguments: str) -> bytes:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    written = EVIL.encode("unicode_escape").decode()
    command = [sys.executable, "-c", PROGRAM, *arguments, written]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).stderr


@pytest.fixture(scope="module")
def text() -> str:
    return run().decode()


@pytest.fixture(scope="module")
def objects() -> list[dict]:
    return [json.loads(line) for line in run("--log-format", "json").splitlines()]


def test_control_characters_are_escaped_in_every_log_line(text):
    assert all(line.isprintable() for line in text.removesuffix("\n").split("\n"))
    begin = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR|CRITICAL) [\w.]+: ")
    assert all(begin.match(line) or line.startswith("    ") for line in text.splitlines()), text
    assert len([line for line in text.splitlines() if begin.match(line)]) == 6


def test_field_values_of_a_log_line_cannot_forge_other_fields(text):
    line = next(line for line in text.splitlines() if "is up" in line)
    assert re.fullmatch(r'.* tenant="[^"]*" count=3', line)


def test_log_lines_of_grpc_and_other_libraries_have_the_common_format(objects):
    told = {record["logger"]: record for record in objects}
    assert set(told) == {"betoken.example", "stderr", "grpc", "root"}
    assert all({"time", "level", "logger", "message"} <= set(record) for record in objects)
    assert "Got goaway" in told["grpc"]["message"] and "forged" in told["grpc"]["message"]
    assert [record["message"] for record in objects if record["logger"] == "stderr"] == ["by Python", "by C"]
    assert (told["betoken.example"]["level"], told["root"]["level"]) == ("ERROR", "CRITICAL")


def test_json_log_lines_keep_fields_and_exceptions_whole(objects):
    first, failed = (record for record in objects if record["logger"] == "betoken.example")
    assert (first["tenant"], first["count"]) == (EVIL, 3)
    assert failed["exception"].startswith("Traceback") and f"ValueError: {EVIL}" in failed["exception"]


def test_log_lines_of_grpc_follow_the_level():
    assert b"goaway" not in run("--log-level", "warning")


def test_an_aborted_service_leaves_its_last_log_lines():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", ABORTED], env=environment, capture_output=True, timeout=60)
        assert json.loads(ended.stderr)["message"] == "last words"


def test_a_log_line_has_a_bounded_length():
    assert len(escaped("x" * (1 << 20))) < MAX_CHARS + 100
