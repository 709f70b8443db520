"""Minutes of faults beside healthy streams, on the embedded pair.

    python -m betoken.bench.soak 10

Two verify workers, a draft worker and the router are killed, stopped and drained at random. Clients cancel, vanish and
read slowly, also over HTTP: unfinished bodies, stray bytes, idle connections, wrong entries, unread answers. Mutants
are sent as calls, as frames and as HTTP requests. Healthy streams over gRPC and HTTP run at the same time, and each
answer is compared with plain decoding from before. The last stdout line is one JSON object. Status 1 if an answer
differed or failed, a service failed at a mutant, or memory, descriptors, connections, threads or pages are held at the
end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from betoken.bench.command import exit_status, positive
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.soak.faults import Faults
from betoken.bench.soak.http_clients import HostileHttp, HttpTraffic
from betoken.bench.soak.traffic import Traffic
from betoken.bench.soak.usage import growth, usage
from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import AsyncClient, RetryPolicy

_NUM_PRINTED = 3
_IDLE_S = 60.0
_RETRY = RetryPolicy(max_retries=100, max_backoff_s=1.0, retry_when_exhausted=True)
_TIMEOUT_S = 600.0


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything at once for the minutes asked for, then idle."""
    overlap = ["--overlap", options.overlap]
    config = LocalServicesConfig(
        *(options.target, options.draft), num_verify_workers=2, compile="off", http_port=0, router_options=overlap
    )
    async with (
        Stack(config) as stack,
        AsyncClient(stack.services.address, retry=_RETRY, timeout_s=_TIMEOUT_S) as client,
    ):
        traffic, faults = await Traffic.begin(client), Faults(stack.services, options.seed)
        host, port = stack.services.services["gateway"].address.rsplit(":", 1)
        http, hostile = HttpTraffic(host, int(port), traffic.cases), HostileHttp(host, int(port), options.seed)
        await hostile.warm_up()
        before, ends, start = await usage(stack.services, stack.client), asyncio.Event(), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(traffic.run(options.seed + number, ends))
            tasks.create_task(faults.harm_services(ends))
            tasks.create_task(faults.be_rude(ends))
            tasks.create_task(http.run(options.seed, ends))
            tasks.create_task(hostile.run(ends))
            await asyncio.sleep(60 * options.minutes)
            ends.set()
        seconds = time.monotonic() - start
        is_free = await _is_free(stack)
        after = await settled_usage(stack, before)
    return {
        "minutes": round(seconds / 60, 2),
        "answers_compared": traffic.num_compared + http.num_compared,
        "answers_equal": traffic.num_equal + http.num_equal,
        "answers_failed": len(traffic.failures) + len(http.failures),
        "failures": (traffic.failures + http.failures)[:_NUM_PRINTED],
        "http_answers_compared": http.num_compared,
        "streams_resumed": traffic.num_resumes,
        "ahead_hits": traffic.num_ahead_hits,
        "faults_injected": sum(faults.counts.values()) + sum(hostile.counts.values()),
        "faults": dict((faults.counts + hostile.counts).most_common()),
        "service_faults": (faults.found + hostile.found)[:_NUM_PRINTED],
        "growth": growth(before, after),
        "everything_free": is_free,
        "start": before,
        "end": after,
        "seed": options.seed,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }


async def settled_usage(stack: Stack, before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the usage once nothing has grown, or after a minute: connections end by their timers."""
    give_up_at = time.monotonic() + _IDLE_S
    while time.monotonic() < give_up_at:
        if not growth(before, await usage(stack.services, stack.client)):
            break
        await asyncio.sleep(1.0)
    return await usage(stack.services, stack.client)


async def _is_free(stack: Stack) -> bool:
    """Whether all workers are connected, and hold no sequence and no page, within a minute of idleness."""
    give_up_at = time.monotonic() + _IDLE_S
    while time.monotonic() < give_up_at:
        info = await stack.client.model_info()
        workers = (*info.verify_workers, *info.draft_workers)
        if all(worker.state == "ready" and worker.free_pages == worker.total_pages > 0 for worker in workers):
            return not any(worker.running or worker.waiting for worker in workers)
        await asyncio.sleep(0.2)
    return False


def is_well(result: dict[str, Any]) -> bool:
    """Whether nothing was found."""
    all_equal = result["answers_compared"] == result["answers_equal"] > 0
    found = result["answers_failed"] or result["service_faults"] or result["growth"]
    return bool(all_equal and not found and result["everything_free"])


def _minutes(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 10_000.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 10000")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak and print; 1 when something was found, 2 when services did not start."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.soak", description=__doc__)
    parser.add_argument("minutes", type=_minutes, help="how long")
    parser.add_argument("--target", default="models/target", help="target model: a directory or hub id")
    parser.add_argument("--draft", default="models/draft", help="draft model, likewise")
    parser.add_argument("--overlap", choices=("off", "on", "auto"), default="on", help="the router's option")
    parser.add_argument("--streams", type=positive, default=3, help="healthy streams at once")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of faults")
    options = parser.parse_args(arguments)
    return exit_status("betoken.bench.soak", lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    result = asyncio.run(run(options))
    print(json.dumps(result))
    return 0 if is_well(result) else 1


if __name__ == "__main__":
    sys.exit(main())
