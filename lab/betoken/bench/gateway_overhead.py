"""Cost of the HTTP gateway: gateway against direct gRPC, over a real router and workers without a model.

    python -m betoken.bench.gateway_overhead --tokenizer DIR

Every request is asked by gRPC and over HTTP, close in time, and each way goes first in turn. The HTTP client is a bare
socket, so that only the gateway is measured. Time per token: from the first to the last event over the tokens
between. No figure is printed unless both texts are equal. The last stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from betoken.bench.command import exit_status, positive
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.prompts import OWN_PROMPTS, load_prompts
from betoken.bench.router_overhead import READY_TIMEOUT_S, fake_workers, router
from betoken.cli.service_process import ServiceFailedError, ServiceProcess
from betoken.client import AsyncClient, RetryPolicy
from betoken.rpc.server import loop_factory

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer."""

    text: str
    first_s: float
    """From the request to the first text."""
    per_token_s: float
    """From there to the last, over the tokens between."""


@asynccontextmanager
async def gateway(router_address: str, folder: Path) -> AsyncIterator[int]:
    """A real gateway; its port.

    Raises:
        ServiceFailedError: it did not start.
    """
    arguments = ["--router", router_address, "--log-level", "warning"]
    service = ServiceProcess("gateway", "betoken.gateway", arguments, directory=folder)
    service.start()
    try:
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while not service.is_ready():
            if time.monotonic() > give_up_at:
                raise ServiceFailedError("gateway", "did not come to serve", service.log_tail())
            await asyncio.sleep(0.05)
        yield service.port
    finally:
        service.terminate()
        if not await asyncio.to_thread(service.wait, 15.0):
            service.kill()


def _timed(text: str, start: float, times: list[float], num_tokens: int) -> Timed:
    return Timed(text, times[0] - start, (times[-1] - times[0]) / max(1, num_tokens - 1))


async def by_grpc(client: AsyncClient, prompt: str, num_tokens: int, seed: int) -> Timed:
    """One answer by the SDK."""
    text, times, start = "", [], time.perf_counter()
    options: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True, "off": True}
    async for piece in client.generate(prompt, max_new_tokens=num_tokens, seed=seed, **options):
        text += piece.text
        times.append(time.perf_counter())
    return _timed(text, start, times, num_tokens)


async def by_http(port: int, prompt: str, num_tokens: int, seed: int) -> Timed:
    """Stream over HTTP.

    Raises:
        ValueError: the gateway refuses.
    """
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "temperature": 0.8}
    data = json.dumps(body | {"ignore_eos": True, "stream": True, "betoken": {"off": True}}).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    text, times, lines = "", [], []
    async for line in reader:
        if line.startswith(b"data: {"):
            lines.append(line)
            times.append(time.perf_counter())
    writer.close()
    for line in lines:
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(event["error"]["message"])
        text += event["choices"][0]["text"]
    if not lines:
        raise ValueError("the gateway refuses")
    return _timed(text, start, times[:-1], num_tokens)  # the last event carries no token


async def measure(client: AsyncClient, port: int, num_streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Times of both ways with `num_streams` concurrent streams, in turns.

    Raises:
        ValueError: two texts differ.
    """
    prompt = load_prompts(OWN_PROMPTS, 1)[0].text
    sides: dict[str, list[Timed]] = {"grpc": [], "http": []}
    for turn in range(options.turns):
        seeds = range(turn * num_streams, (turn + 1) * num_streams)
        asked = {
            "grpc": lambda seed: by_grpc(client, prompt, options.max_new_tokens, seed),
            "http": lambda seed: by_http(port, prompt, options.max_new_tokens, seed),
        }
        order = ("grpc", "http") if turn % 2 else ("http", "grpc")
        for side in order:
            sides[side] += await asyncio.gather(*map(asked[side], seeds))
    pairs = list(zip(sides["grpc"], sides["http"], strict=True))
    if any(one.text != other.text for one, other in pairs):
        raise ValueError("an answer over HTTP is another than by gRPC")
    figures: dict[str, Any] = {"streams": num_streams, "pairs": len(pairs)}
    for side, timed in sides.items():
        for name in ("first_s", "per_token_s"):
            values = np.percentile([getattr(one, name) for one in timed], PERCENTILES)
            figures[f"{side}_{name.removesuffix('_s')}_ms"] = [round(1000 * float(value), 3) for value in values]
    added = median(other.per_token_s - one.per_token_s for one, other in pairs)
    return figures | {"added_per_token_ms": round(1000 * added, 3)}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of streams."""
    with tempfile.TemporaryDirectory(prefix="betoken-") as name:
        folder = Path(name)
        async with (
            fake_workers(options.tokenizer, options.step_ms, folder),
            router(options.tokenizer, folder) as service,
            gateway(service.address, folder) as port,
            AsyncClient(service.address, retry=RetryPolicy(max_retries=3)) as client,
        ):
            warm = argparse.Namespace(turns=2, max_new_tokens=options.max_new_tokens)
            await measure(client, port, 1, warm)
            results = [await measure(client, port, num, options) for num in options.streams]
    return {
        "bench": "gateway_overhead",
        "step_ms": options.step_ms,
        "max_new_tokens": options.max_new_tokens,
        "results": results,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.gateway_overhead", description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="directory or hub id")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 4, 16, 64], help="streams at once")
    parser.add_argument("--turns", type=positive, default=6, help="times that all streams are asked, each way")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=10.0, help="pretended duration of a forward")
    options = parser.parse_args(arguments)
    return exit_status("betoken.bench.gateway_overhead", lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        result = runner.run(run(options))
    for figures in result["results"]:
        print(", ".join(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
