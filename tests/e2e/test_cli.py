"""The `betoken` command against running services."""

import asyncio
import json
import subprocess
import sys

import pytest

from betoken.bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "betoken.cli", *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


async def test_the_generate_command_with_json_gives_the_answer_of_the_sdk(stack: Stack, prompts: list[str]) -> None:
    expected = await stack.client.complete(prompts[0], max_new_tokens=24, temperature=0)
    flags = ["--address", stack.services.address, "--max-new-tokens", "24", "--temperature", "0", "--json"]
    done = await run_cli("generate", "--raw", prompts[0], *flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["text"] == expected.text


async def test_an_error_of_the_command_is_one_line_and_an_exit_status(stack: Stack) -> None:
    done = await run_cli("generate", "x", "--address", stack.services.address, "--temperature", "-1")
    assert done.returncode != 0
    assert "--temperature = -1.0: must be 0 to 100" in done.stderr and done.stderr.count("\n") == 1
