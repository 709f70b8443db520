"""The clients of `examples/` stream answers of a router; Node's is made from the protos alone."""

import asyncio
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import CHAT_TEMPLATE, Cluster, byte_tokenizer_json, running_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
_INSTALL_S = 120


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    tokenizer = Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")
    async with running_cluster(tokenizer) as cluster:
        yield cluster
        await cluster.until_idle()


async def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, **options)


async def test_the_blocking_client_streams_one_answer(cluster):
    done = await run(sys.executable, str(EXAMPLES / "client.py"), cluster.address, "a prompt")
    assert done.returncode == 0, done.stderr
    num_tokens, num_forwards = map(int, re.search(r"(\d+) tokens, (\d+) target forwards", done.stdout).groups())
    assert 1 <= num_forwards <= num_tokens <= 64


async def test_the_async_client_answers_prompts_in_their_order(cluster):
    from betoken.client import AsyncClient

    example = runpy.run_path(str(EXAMPLES / "async_client.py"))
    prompts = ("one", "two", "three", "one")
    async with AsyncClient(cluster.address) as client:
        together = await example["complete"](client, prompts)
        alone = [
            await client.complete(prompt, max_new_tokens=32, temperature=0.8, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
    assert [done.output_ids for done in together] == [done.output_ids for done in alone]
    assert together[0].output_ids != together[3].output_ids, "seeds differ"


async def test_the_async_client_prints_every_prompt(cluster):
    done = await run(sys.executable, str(EXAMPLES / "async_client.py"), cluster.address, "one", "two")
    assert done.returncode == 0, done.stderr
    assert [line[:7] for line in done.stdout.splitlines() if line.startswith("--- ")] == ["--- one", "--- two"]


@pytest.fixture(scope="session")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in a separate folder, with its packages."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node or npm is missing")
    folder = tmp_path_factory.mktemp("node")
    for name in ("client.mjs", "package.json", "package-lock.json"):
        shutil.copy(EXAMPLES / "node" / name, folder)
    command = ("npm", "ci", "--no-audit", "--no-fund", "--prefer-offline", "--ignore-scripts")
    try:
        installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm could not fetch the packages within {_INSTALL_S} s")
    if installed.returncode:
        pytest.skip(f"npm could not fetch the packages: {installed.stderr.strip()[-300:]}")
    return folder / "client.mjs"


def node_environment() -> dict[str, str]:
    return os.environ | {"PROTOS": str(EXAMPLES.parent / "protos")}


async def test_node_streams_one_answer(node_client, cluster):
    done = await run("node", str(node_client), cluster.address, "a prompt", env=node_environment())
    assert done.returncode == 0, done.stderr
    assert re.search(r"\n\d+ tokens, FINISH_REASON_\w+\n$", done.stdout), done.stdout


async def test_node_shows_a_refusal(node_client, cluster):
    done = await run("node", str(node_client), cluster.address, "", env=node_environment())
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT: prompt"), done.stderr
