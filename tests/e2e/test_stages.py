"""Verify workers of two pipeline stages: the tokens of one process, and their end if a stage is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from betoken.client import Speculation
from betoken.rpc.early_end import undone_at_end
from tests.e2e.attached import answers as answers_of
from tests.e2e.attached import reported, save_attached
from tests.e2e.in_process import mark_pard, running, save_pair, services, until_all_pages_are_free
from tests.e2e.rank_answers import CASES, TIMEOUT_S, answers, check_ended, compilers_go_on
from tests.e2e.setups import save_block_drafter, save_mtp

__all__ = ["compilers_go_on"]

OPTIONS = ("--dtype", "float32", "--compile", "off", "--threads", "1", "--num-pages", "256", "--pipeline", "2")


async def test_answers_go_on_from_two_stages_to_one_process(tmp_path: Path) -> None:
    save_pair(tmp_path, "qwen3_5")
    with undone_at_end():
        async with running(
            tmp_path, {"drafters": ("model",)}, {"pipeline": 2}, other_verify_options=[{"device": "cpu"}]
        ) as stack:
            expected = await answers(stack.client, CASES["model"])
            stack.verify_hold.after(6)
            again = asyncio.ensure_future(answers(stack.client, CASES["model"]))
            await stack.verify_hold.reached()
            await stack.lose_verify()
            assert await again == expected


@pytest.mark.parametrize("is_hybrid", [False, True])
async def test_attached_drafters_on_hidden_states_of_two_stages_give_the_plain_tokens(
    is_hybrid: bool, tmp_path: Path
) -> None:
    if is_hybrid:
        verify = save_mtp(tmp_path) | {"attached_drafters": ("mtp",)}
    else:
        verify = save_attached(tmp_path, "llama of two layers") | save_block_drafter(tmp_path)
        verify |= {"attached_drafters": ("medusa", "eagle3", "dflash", "pard"), "pard": str(tmp_path / "draft")}
        mark_pard(tmp_path)
    with undone_at_end():
        async with services(tmp_path, {"drafters": ("ngram",)}, verify | {"pipeline": 2}) as client:
            plain = reported(await answers_of(client, Speculation(off=True), 0.8))
            for name in verify["attached_drafters"]:
                drafted = await answers_of(client, Speculation(name, num_draft_tokens=4), 0.8)
                assert reported(drafted) == plain, name
                assert sum(one.speculation.num_failed_drafts for one in drafted) == 0
                assert sum(one.speculation.num_draft_tokens for one in drafted) > 0
            await until_all_pages_are_free(client)


@contextmanager
def launched(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A worker of two stages that torchrun has started, and its address."""
    address, ready = f"unix:{folder}/stages.sock", folder / "ready"
    launcher = ["--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", "-m", "betoken.cli"]
    worker = ["verify-worker", "--model", str(folder / "target"), "--host", address, "--ready-file", str(ready)]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, *worker, *OPTIONS]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < give_up_at, (folder / "log").read_text()[-3000:]
            time.sleep(0.1)
        yield process, address
    finally:
        for pid in [*ranks_of(process.pid).values(), process.pid]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)


def ranks_of(pid: int) -> dict[int, int]:
    """Process ids by rank of the children of a launcher."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StopIteration):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                variables = (folder / "environ").read_text().split("\0")
                found[int(next(each for each in variables if each.startswith("RANK="))[5:])] = int(folder.name)
    return found


@pytest.mark.timeout(400)
async def test_answers_go_on_at_a_worker_that_torchrun_started(tmp_path: Path) -> None:
    save_pair(tmp_path, "qwen3_5")
    with launched(tmp_path) as (process, address), undone_at_end():
        pids = ranks_of(process.pid)
        async with running(tmp_path, {"drafters": ("model",)}, more_verify=[address]) as stack:
            async with asyncio.timeout(TIMEOUT_S):
                while {each.state for each in (await stack.client.model_info()).verify_workers} != {"ready"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            expected = await answers(stack.client, CASES["model"])
            stack.verify_hold.after(6)
            again = asyncio.ensure_future(answers(stack.client, CASES["model"]))
            await stack.verify_hold.reached()
            await stack.lose_verify()
            assert await again == expected
        assert sorted(pids) == [0, 1]
        os.kill(pids[1], signal.SIGKILL)
        assert await asyncio.to_thread(process.wait, TIMEOUT_S)
        await asyncio.to_thread(check_ended, set(pids.values()))
