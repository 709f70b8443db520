"""A verify worker of two processes: the tokens of one, and its end if a rank is killed."""

import asyncio
import logging
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from betoken.bench.stack import Stack
from betoken.cli.local_services import VERIFY_MODULE, LocalServicesConfig
from betoken.cli.service_process import ServiceProcess
from betoken.client import Completion
from betoken.rpc.early_end import undone_at_end
from tests.e2e.attached import save_attached
from tests.e2e.in_process import Running, running, save_pair, services, until_all_pages_are_free
from tests.e2e.pair import make_pair
from tests.e2e.rank_answers import CASES, TIMEOUT_S, answers, check_ended, compilers_go_on
from tests.products import slow

__all__ = ["compilers_go_on"]

_LOG = logging.getLogger(__name__)

OPTIONS = ("--dtype", "float32", "--compile", "off", "--threads", "1", "--num-pages", "512")
NUM_KILLS, NUM_STREAMS = 25, 12
LENGTHS = {"max_new_tokens": 100, "temperature": 0.8, "ignore_eos": True}


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks that a worker has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if b"betoken.engine.bring_up.ranks" in command and int(status.rpartition(")")[2].split()[1]) == pid:
            found.append(int(folder.name))
    return found


async def ids_of(stack: Stack, prompts: list[str]) -> list[tuple[int, ...]]:
    """Token ids of all answers at once, so that both workers have some."""
    calls = [stack.client.complete(prompt, seed=seed, **LENGTHS) for seed, prompt in enumerate(prompts)]
    answers: list[Completion] = await asyncio.gather(*calls)
    return [tuple(token.id for token in answer.tokens) for answer in answers]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("option", ["--tensor-parallel", *slow("--pipeline")])
async def test_answers_go_on_with_equal_tokens_if_a_rank_is_killed(
    option: str, pair, prompts: list[str], tmp_path: Path
) -> None:
    shared = ServiceProcess(
        "ranks",
        VERIFY_MODULE,
        ("--model", pair.target, *OPTIONS, option, "2"),
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
    assert sorted(worker.tensor_parallel_degree * worker.pipeline_parallel_degree for worker in workers) == [1, 2]
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
    return [
        worker for worker in info.verify_workers if worker.tensor_parallel_degree * worker.pipeline_parallel_degree == 2
    ]


ATTACHED: dict[str, dict[str, Any]] = {
    "medusa": {"drafter": "medusa", "num_draft_tokens": 8},
    "eagle3": {"drafter": "eagle3", "drafter_settings": {"max_branches": 4}, "num_draft_tokens": 4},
}


@pytest.mark.parametrize("family", ["llama", *slow("qwen3_5")])
async def test_drafters_constraints_and_preemption_on_two_ranks_give_the_tokens_of_one(
    family: str, tmp_path: Path
) -> None:
    cases = CASES | (ATTACHED if family == "llama" else {})
    options: dict[str, Any] = {"num_pages": 13, "max_context": 200, "attached_drafters": ("ngram",)}
    if family == "llama":
        options |= save_attached(tmp_path)
    else:
        save_pair(tmp_path, family)
    found: list[dict[str, list[Any]]] = []
    for device in ("cpu", "cpu,cpu"):
        with undone_at_end():
            drafting = {"drafters": ("model",), "device": device}
            async with services(tmp_path, drafting, options | {"device": device}) as client:
                found.append({name: await answers(client, case) for name, case in cases.items()})
                info = await client.model_info()
                (worker,) = info.verify_workers
                degrees = [each.tensor_parallel_degree for each in (worker, *info.draft_workers)]
                assert degrees == [device.count("cpu")] * 2
                assert worker.preemptions > 0 and worker.cached_tokens > 0
                await until_all_pages_are_free(client)
    for name in cases:
        assert found[1][name] == found[0][name], name


async def test_answers_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    save_pair(tmp_path, "qwen3_5")
    with undone_at_end():
        async with running(
            tmp_path, {"drafters": ("model",)}, {"device": "cpu,cpu"}, other_verify_options=[{"device": "cpu"}]
        ) as stack:
            await check_losses(stack, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_answers_go_on_from_two_ranks_with_one_and_with_two_again(family: str, tmp_path: Path) -> None:
    save_pair(tmp_path, family)
    others = [{"device": "cpu"}, {"device": "cpu,cpu"}]
    drafting = {"drafters": ("model",), "device": "cpu,cpu"}
    with undone_at_end():
        async with running(tmp_path, drafting, {"device": "cpu,cpu"}, other_verify_options=others) as stack:
            await check_losses(stack, 2)


async def check_losses(stack: Running, num_lost: int) -> None:
    """So many workers are lost in the middle of answers, one after the other."""
    expected = await answers(stack.client, CASES["model"])
    for worker in stack.verify_workers[:num_lost]:
        worker.hold.after(6)
    again = asyncio.ensure_future(answers(stack.client, CASES["model"]))
    for worker in stack.verify_workers[:num_lost]:
        await worker.hold.reached()
        await worker.lose()
    assert await again == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("option", ["--tensor-parallel", "--pipeline"])
async def test_answers_under_load_are_equal_while_ranks_are_killed(option: str, seed: int, tmp_path: Path) -> None:
    """Kill random ranks at random times, of answers or of the start; no process is left."""
    make_pair(tmp_path)
    rng, target = random.Random(seed), str(tmp_path / "target")
    shared = ServiceProcess(
        "ranks",
        VERIFY_MODULE,
        ("--model", target, *OPTIONS, option, "2"),
        directory=tmp_path,
        host=f"unix:{tmp_path}/ranks.sock",
    )
    shared.start()
    router_options = ("--verify", shared.address)
    config = LocalServicesConfig(target, drafters=(), verify_options=OPTIONS, router_options=router_options)
    prompts, num_moved = [f"def number_{number}(" for number in range(NUM_STREAMS)], 0
    try:
        async with Stack(config) as stack:
            expected = await ids_of(stack, prompts)
            for number in range(NUM_KILLS):
                num_moved += await kill_a_rank(stack, shared, rng, prompts, expected)
                _LOG.info("%s, seed %d: %d kills, %d sequences moved", option, seed, number + 1, num_moved)
                await asyncio.to_thread(shared.start)
    finally:
        shared.kill()
    assert num_moved >= NUM_KILLS // 2


async def kill_a_rank(
    stack: Stack, shared: ServiceProcess, rng: random.Random, prompts: list[str], expected: list[tuple[int, ...]]
) -> int:
    """Kill a rank while answers are under way; return the number of sequences that its worker ran."""
    at_start = rng.random() < 0.2
    async with asyncio.timeout(TIMEOUT_S):
        while not (ranks_of(shared.pid) if at_start else await is_ready(stack)):
            shared.check()
            await asyncio.sleep(0.02)
    again = asyncio.ensure_future(ids_of(stack, prompts))
    await asyncio.sleep(rng.uniform(0, 4 if at_start else 0.3))
    while not (num_running := sum(worker.running for worker in await shared_workers(stack))) and not at_start:
        if again.done():
            assert await again == expected
            again = asyncio.ensure_future(ids_of(stack, prompts))
        await asyncio.sleep(rng.uniform(0, 0.05))
    pids = [shared.pid, *ranks_of(shared.pid)]
    os.kill(rng.choice(pids), signal.SIGKILL)
    assert await again == expected
    assert await asyncio.to_thread(shared.wait, TIMEOUT_S)
    await asyncio.to_thread(check_ended, set(pids))
    return num_running


async def is_ready(stack: Stack) -> bool:
    return any(worker.state == "ready" for worker in await shared_workers(stack))
