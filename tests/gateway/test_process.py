"""The gateway as a process: options, refusals, ready file, the end of answers under way on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.certificates import make_certificate
from tests.gateway.conftest import MakeGate


@asynccontextmanager
async def running(tmp_path: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The process and its port."""
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "betoken.gateway", "--port", "0", "--ready-file", str(ready), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            while not ready.exists():  # noqa: ASYNC110
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield process, json.loads(ready.read_text())["port"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--router", "nowhere"], 2, "--router"),
        (["--port", "70000"], 2, "--port"),
        (["--max-body-bytes", "1"], 2, "--max-body-bytes"),
        (["--ready-file", "/no/where"], 2, "--ready-file"),
        (["--tls-cert-file", __file__], 2, "--tls-key-file"),
        (["--wishes", "3"], 2, "--wishes"),
        (["--host", "no.such.host.invalid"], 1, "no.such.host.invalid"),
        (["--port", "0", "--tls-cert-file", __file__, "--tls-key-file", __file__], 1, "TLS"),
    ],
)
def test_a_bad_option_of_the_gateway_stops_the_start_and_is_named(
    arguments: list[str], status: int, named: str
) -> None:
    command = [sys.executable, "-m", "betoken.gateway", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status and named in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_answers_under_way_end_well_on_sigterm(make_gate: MakeGate, tmp_path: Path) -> None:
    cluster = (await make_gate(step_s=0.01)).cluster
    async with running(tmp_path, "--router", cluster.address) as (process, port):
        body: dict[str, Any] = {"prompt": "the", "max_tokens": 150, "stream": True}
        events = []
        async with (
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
            http.stream("POST", "/v1/completions", json=body) as reply,
        ):
            async for line in reply.aiter_lines():
                if not events:
                    process.send_signal(signal.SIGTERM)
                events.append(line)
        assert [line for line in events if line][-1] == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not (tmp_path / "ready").exists()
        _, log = await asyncio.wait_for(process.communicate(), 60)
        assert "path=/v1/completions status=200" in log.decode()


async def test_https_is_spoken_where_there_is_a_certificate(make_gate: MakeGate, tmp_path: Path) -> None:
    cluster = (await make_gate()).cluster
    make_certificate(tmp_path, "own", "localhost")
    files = ["--tls-cert-file", str(tmp_path / "own.pem"), "--tls-key-file", str(tmp_path / "own.key")]
    options = ["--router", cluster.address, *files]
    async with running(tmp_path, *options) as (_, port), httpx2.AsyncClient(verify=False) as http:
        reply = await http.get(f"https://127.0.0.1:{port}/v1/models")
    assert reply.json()["data"][0]["id"] == "fake"
