"""A verify worker of two processes: the tokens of one, and its end if a rank is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from betoken.bench.stack import Stack
from betoken.cli.local_services import VERIFY_MODULE, LocalServicesConfig
from betoken.cli.service_process import ServiceProcess
from betoken.client import Completion

TIMEOUT_S = 120.0
OPTIONS = ("--dtype", "float32", "--compile", "off", "--threads", "1", "--num-pages", "512")
LENGTHS = {"max_new_tokens": 100, "temperature": 0.8, "ignore_eos": True}


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks that a worker has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if b"betoken.verify_worker.ranks" in command and int(status.rpartition(")")[2].split()[1]) == pid:
            found.append(int(folder.name))
    return found


async def ids_of(stack: Stack, prompts: list[str]) -> list[tuple[int, ...]]:
    """Token ids of all answers at once, so that both workers have some."""
    calls = [stack.client.complete(prompt, seed=seed, **LENGTHS) for seed, prompt in enumerate(prompts)]
    answers: list[Completion] = await asyncio.gather(*calls)
    return [tuple(token.id for token in answer.tokens) for answer in answers]


@pytest.mark.timeout(400)
async def test_answers_go_on_with_equal_tokens_if_a_rank_is_killed(pair, prompts: list[str], tmp_path: Path) -> None:
    shared = ServiceProcess(
        "ranks",
        VERIFY_MODULE,
        ("--model", pair.target, *OPTIONS, "--tensor-parallel", "2"),
        directory=tmp_path,
        host=f"unix:{tmp_path}/ranks.sock",
    )
    shared.start()
    try:
        config = LocalServicesConfig(
            pair.target,
            drafters=(),
            verify_options=OPTIONS,
            router_options=("--verify", shared.address),
        )
        async with Stack(config) as stack:
            await check_failover(stack, shared, prompts[:2])
    finally:
        shared.kill()


async def check_failover(stack: Stack, shared: ServiceProcess, prompts: list[str]) -> None:
    workers = (await stack.client.model_info()).verify_workers
    assert sorted(worker.tensor_parallel_degree for worker in workers) == [1, 2]
    assert {worker.state for worker in workers} == {"ready"}
    (rank,) = ranks_of(shared.pid)
    expected = await ids_of(stack, prompts)
    again = asyncio.ensure_future(ids_of(stack, prompts))
    async with asyncio.timeout(TIMEOUT_S):
        while not any(worker.running for worker in await shared_workers(stack)):
            if again.done():  # on a machine so fast that all answers were over before
                again = asyncio.ensure_future(ids_of(stack, prompts))
            await asyncio.sleep(0.01)
    os.kill(rank, signal.SIGKILL)
    assert await again == expected
    assert await asyncio.to_thread(shared.wait, TIMEOUT_S) and not shared.was_stopped
    assert f"rank 1, pid {rank}, was ended by SIGKILL" in shared.log_tail(40)


async def shared_workers(stack: Stack) -> list:
    info = await stack.client.model_info()
    return [worker for worker in info.verify_workers if worker.tensor_parallel_degree == 2]
