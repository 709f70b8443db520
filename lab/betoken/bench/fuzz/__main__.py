"""Mutants of every message a client or a router may send, HTTP requests included, against the services of the embedded
pair.

    python -m betoken.bench.fuzz --mutants 20000 --http-mutants 100000 --seed 1

After each batch an answer must be what it was before, and all pages free. The last stdout line is one JSON object: how
many mutants of each message were answered with which status. Status 1 when a service failed or something was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from betoken.bench.command import exit_status, positive
from betoken.bench.fuzz import seeds
from betoken.bench.fuzz.campaign import FaultError, fuzz_calls, fuzz_link
from betoken.bench.fuzz.check import HealthCheck, LeftBehindError
from betoken.bench.fuzz.http_campaign import fuzz_http
from betoken.bench.machine import describe_versions
from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig
from betoken.testing.mutation import Mutator

_GATEWAY_OPTIONS = ("--body-timeout-s", "0.5")
"""Mutants announce bodies that never come."""
PROMPT = "def fibonacci(n):"
_FRAMES = {"verify": seeds.verify_frames, "draft": seeds.draft_frames}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every message, one after the other.

    Raises:
        FaultError, LeftBehindError: what a service did wrong.
    """
    config = LocalServicesConfig(
        options.target, options.draft, compile="off", http_port=0, gateway_options=_GATEWAY_OPTIONS
    )
    statuses: dict[str, dict[str, int]] = {}
    start = time.monotonic()
    async with Stack(config) as stack:
        health = await HealthCheck.begin(stack.client, PROMPT)

        async def check() -> None:
            stack.services.check()
            await health.check()

        if options.http_mutants:
            host, port = stack.services.services["gateway"].address.rsplit(":", 1)
            chance = random.Random(options.seed)
            http = await fuzz_http(host, int(port), options.http_mutants, chance, check)
            statuses["HTTP"] = {str(status): num for status, num in http.items()}
            print(f"HTTP: {statuses['HTTP']}")
        for method, originals in (seeds.calls() if options.mutants else {}).items():
            mutator = Mutator(options.seed)
            found = await fuzz_calls(stack.services.address, method, originals, mutator, options.mutants, check)
            statuses[method] = dict(found)
            print(f"{method}: {statuses[method]}")
        for role, frames in (_FRAMES if options.mutants else {}).items():
            address = stack.services.services[role].address
            found = await fuzz_link(address, role, frames, Mutator(options.seed), options.mutants, check)
            statuses[f"{role} link"] = dict(found)
            print(f"{role} link: {statuses[f'{role} link']}")
    return {
        "mutants_per_message": options.mutants,
        "http_mutants": options.http_mutants,
        "seed": options.seed,
        "statuses": statuses,
        "seconds": round(time.monotonic() - start, 1),
        "versions": describe_versions(),
    }


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz and print; 1 when something was found, 2 when nothing could be tried."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.fuzz", description=__doc__)
    parser.add_argument("--target", default="models/target", help="target model: a directory or hub id")
    parser.add_argument("--draft", default="models/draft", help="draft model, likewise")
    parser.add_argument("--mutants", type=_count, default=20_000, help="mutants of each message; 0 = HTTP alone")
    parser.add_argument("--http-mutants", type=_count, default=20_000, help="mutated HTTP requests; 0 = none")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same mutants")
    options = parser.parse_args(arguments)
    return exit_status("betoken.bench.fuzz", lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    try:
        result = asyncio.run(run(options))
    except (FaultError, LeftBehindError) as error:
        print(f"python -m betoken.bench.fuzz: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
