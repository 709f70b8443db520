"""Overhead of the router in a round: real router, real gRPC, workers without a model.

    python -m betoken.bench.router_overhead --tokenizer DIR

Overhead of a round = its duration in the router less both workers' queue and forward times; p50 within a request, then
the median over requests. With many streams rounds share the event loop. Overhead is therefore also given per sequence,
and as the router's own processor time per round, which is independent of other load. The client runs on the same
machine and takes its share. No figure is printed unless every answer is what the pretended model says and the workers
found nothing amiss with the router. The last stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from betoken.bench.command import exit_status, positive
from betoken.bench.fake_workers import READY_FILE
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.near_tie import first_difference
from betoken.bench.prompts import OWN_PROMPTS, load_prompts
from betoken.bench.streams import generate, run_bounded, sampling, speculation
from betoken.cli.report import TimedCompletion
from betoken.cli.service_process import ServiceFailedError, ServiceProcess, service_environment
from betoken.client import AsyncClient, Completion, RetryPolicy
from betoken.rpc.server import loop_factory
from betoken.testing.fake_model import FakeModel
from betoken.v1.types_pb2 import OpenSequence

TEMPERATURE = 0.8
READY_TIMEOUT_S = 60.0
_LATE = "did not come to serve within {:g} s"


@asynccontextmanager
async def fake_workers(tokenizer: str, step_ms: float, folder: Path) -> AsyncIterator[None]:
    """Fake workers in a separate process, on the sockets `verify.sock` and `draft.sock` of `folder`.

    Raises:
        ServiceFailedError: they did not start.
        RuntimeError: they did not end well.
    """
    command = [sys.executable, "-m", "betoken.bench.fake_workers", "--tokenizer", tokenizer]
    command += ["--step-ms", str(step_ms), "--folder", str(folder)]
    process = _start(command)
    try:
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while not (folder / READY_FILE).exists():
            if process.poll() is not None:
                raise ServiceFailedError("the fake workers", f"ended with status {process.returncode}", "")
            if time.monotonic() > give_up_at:
                raise ServiceFailedError("the fake workers", _LATE.format(READY_TIMEOUT_S), "")
            await asyncio.sleep(0.05)
        yield
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
    if process.returncode != 0:  # for example if the router violated the protocol
        raise RuntimeError(f"the fake workers ended with status {process.returncode}")


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """As the router does: in its own session, and without asyncio (see `loop_factory`)."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=service_environment(), start_new_session=True)


@asynccontextmanager
async def router(tokenizer: str, folder: Path) -> AsyncIterator[ServiceProcess]:
    """A real router over the fake workers."""
    arguments = [part for role in ("verify", "draft") for part in (f"--{role}", f"unix:{folder}/{role}.sock")]
    service = ServiceProcess("router", "betoken.router", [*arguments, "--tokenizer", tokenizer], directory=folder)
    service.start()
    try:
        await asyncio.to_thread(_wait_until_ready, service)
        yield service
    finally:
        service.terminate()
        if not await asyncio.to_thread(service.wait, 15.0):
            service.kill()


def _wait_until_ready(service: ServiceProcess) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while not service.is_ready():
        if time.monotonic() > give_up_at:
            raise ServiceFailedError(service.name, _LATE.format(READY_TIMEOUT_S), service.log_tail())
        time.sleep(0.05)


async def measure(
    client: AsyncClient, process: psutil.Process, num_streams: int, options: argparse.Namespace
) -> dict[str, float]:
    """Overhead with `num_streams` concurrent streams; `process` is the router's.

    Raises:
        RuntimeError: an answer is not the model's, or nothing was drafted.
    """
    text = load_prompts(OWN_PROMPTS, 1)[0].text
    how = speculation("model", options.num_draft_tokens)

    async def work(seed: int) -> TimedCompletion:
        return await generate(client, text, sampling(options.max_new_tokens, TEMPERATURE, seed=seed), how)

    await run_bounded(range(num_streams), work, num_streams)
    num_requests = max(options.requests, 4 * num_streams)
    start, start_cpu_s = time.perf_counter(), _cpu_s(process)
    timed = await run_bounded(range(num_requests), work, num_streams)
    seconds, cpu_s = time.perf_counter() - start, _cpu_s(process) - start_cpu_s
    model = FakeModel((await client.model_info()).vocab_size)
    for answer in timed:
        check(answer.completion, model, options.max_new_tokens)
    stats = [answer.completion.speculation for answer in timed]
    num_rounds = sum(s.num_drafts for s in stats)
    if not num_rounds:
        raise RuntimeError("nothing was drafted")
    overhead_ms = 1000 * median(s.router_overhead_p50_s for s in stats if s.num_drafts)
    return {
        "round_overhead_p50_ms": round(overhead_ms, 3),
        "per_sequence_ms": round(overhead_ms / num_streams, 4),
        "router_cpu_ms_per_round": round(1000 * cpu_s / num_rounds, 4),
        "rounds_per_s": round(num_rounds / seconds, 1),
        "tokens_per_s": round(sum(len(answer.completion.output_ids) for answer in timed) / seconds, 1),
        "failed_drafts": sum(s.num_failed_drafts for s in stats),
    }


def check(answer: Completion, model: FakeModel, max_new_tokens: int) -> None:
    """Raises:
    RuntimeError: the answer is not what the model says.
    """
    entry = OpenSequence(prompt_ids=answer.prompt_ids)
    entry.sampling.temperature, entry.sampling.seed = TEMPERATURE, answer.seed
    ids = model.generate(entry, max_new_tokens)
    if model.eos_token_id in ids:
        ids = ids[: ids.index(model.eos_token_id) + 1]
    position = first_difference(answer.output_ids, ids)
    if position is not None:
        raise RuntimeError(f"the answer with seed {answer.seed} differs from the model's at output position {position}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every number of streams.

    Raises:
        RuntimeError: a process or an answer is not as it must be.
    """
    with tempfile.TemporaryDirectory(prefix="betoken-") as name:
        folder = Path(name)
        async with (
            fake_workers(options.tokenizer, options.step_ms, folder),
            router(options.tokenizer, folder) as service,
            AsyncClient(service.address, retry=RetryPolicy(max_retries=0)) as client,
        ):
            process = psutil.Process(service.pid)
            results = {}
            for num_streams in options.streams:
                results[str(num_streams)] = await measure(client, process, num_streams, options)
    return {
        "streams": results,
        "step_ms": options.step_ms,
        "num_draft_tokens": options.num_draft_tokens,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when an answer or the router was wrong, 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.router_overhead", description=__doc__)
    add = parser.add_argument
    add("--tokenizer", default="models/target", help="directory or hub id with a tokenizer")
    add("--streams", type=positive, nargs="+", default=[1, 64], help="numbers of streams at once")
    add("--step-ms", type=_not_negative, default=0.0, help="pretended duration of a forward")
    add("--num-draft-tokens", type=positive, default=4, help="tokens per draft block")
    add("--max-new-tokens", type=positive, default=128, help="tokens per answer")
    add("--requests", type=positive, default=16, help="fewest requests per number of streams")
    options = parser.parse_args(arguments)
    return exit_status("betoken.bench.router_overhead", lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:  # the client takes little of the machine
            result = runner.run(run(options))
    except ServiceFailedError:
        raise
    except RuntimeError as error:
        print(f"python -m betoken.bench.router_overhead: {error}: no figures", file=sys.stderr)
        return 1
    for num_streams, figures in result["streams"].items():
        print(f"{num_streams:>4} streams: {figures}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
