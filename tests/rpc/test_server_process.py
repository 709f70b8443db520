"""A service as a process: signals, interrupts during a load, and settings rejected before the load."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from betoken.rpc.server import run_service, serve
from betoken.rpc.servicing import typed_errors
from betoken.rpc.settings import ServiceSettings
async def on_drain(grace_s):
    await asyncio.sleep(float(sys.argv[-1]))
settings = ServiceSettings.parse(sys.argv[1:-1])
sys.exit(run_service("example", settings, lambda: serve([], settings, on_drain=on_drain)))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("drain_s", "signals"), [("0.1", 1), ("300", 2)])
async def test_a_signal_drains_a_service_and_a_second_one_stops_it(tmp_path, signum, drain_s, signals):
    ready_file = tmp_path / "ready"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["-c", PROGRAM, "--ready-file", str(ready_file), "--drain-grace-s", "600", drain_s]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            while not ready_file.exists():  # noqa: ASYNC110 (another process makes it)
                await asyncio.sleep(0.02)
            process.send_signal(signum)
            told = b""
            while b"draining" not in told:  # two signals that come together are one
                line = await process.stderr.readline()
                assert line, told
                told += line
            if signals > 1:
                process.send_signal(signum)
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    stderr = told + stderr
    assert process.returncode == 0, stderr.decode()
    assert stdout == b""
    lines = stderr.decode().splitlines()
    assert any(line.endswith("betoken.rpc.server: stopped") for line in lines)
    assert all(" INFO betoken.rpc.server: " in line for line in lines), lines


LOADING = """
import asyncio, signal, sys, threading
import torch
from betoken.rpc.server import run_service
from betoken.rpc.settings import ServiceSettings
def load():
    layer = torch.nn.Linear(64, 64)
    print("loading", flush=True)
    while True:
        layer(torch.ones(2, 64)).sum().backward()
async def body():
    threading.Thread(target=load, daemon=True).start()
    await asyncio.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in a shell's background, which ignores it
sys.exit(run_service("example", ServiceSettings(), body))
"""


async def test_an_interrupt_while_a_model_loads_ends_the_process_in_order():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOADING, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        assert await process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")


IMPORTING = """
import importlib.abc, runpy, signal, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == f"{module}.service":
            print("importing", flush=True)
            time.sleep(600)
module = sys.argv.pop(1)
sys.meta_path.insert(0, Slow())
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in a shell's background, which ignores it
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["betoken.verify_worker", "betoken.draft_worker"])
async def test_an_interrupt_does_not_wait_for_what_a_worker_imports(module):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IMPORTING, module, "--model", "none"]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        assert await process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")


STARTING = """
import sys
from betoken.rpc.server import run_service
from betoken.rpc.settings import ServiceSettings
async def body():
    print("loading")
sys.exit(run_service("example", ServiceSettings.parse(sys.argv[1:]), body))
"""


def test_a_port_in_use_is_refused_before_anything_is_loaded():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-c", STARTING, "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b": it is in use\n" in ended.stderr


def test_another_certificates_key_is_refused_by_name_before_anything_is_loaded(certificates):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    cert, key = certificates / "server.pem", certificates / "client.key"
    command = [sys.executable, "-c", STARTING, "--tls-cert-file", cert, "--tls-key-file", key]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"tls.key_file = {key}"[:80] in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_EXPORTER_OTLP_COMPRESSION", "deflate"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1")]
)
def test_a_bad_setting_of_the_telemetry_sdk_is_refused_in_a_line(variable, value):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), variable: value}
    arguments = [sys.executable, "-c", STARTING, "--otlp-endpoint", "http://127.0.0.1:4317"]
    started = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60)
    assert (started.returncode, started.stdout) == (1, "")
    assert variable in started.stderr and started.stderr.count("\n") == 1
