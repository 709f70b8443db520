"""Overlapped against synchronous rounds of one pair, one core for each model.

    python -m betoken.bench.overlapped_rounds --target FILE --draft FILE --prompts FILE

One verify worker and one draft worker serve a router without overlap and one router for each fan-out. Every prompt is
answered without speculation, synchronously, and with each fan-out, in rotating order. Speeds are printed only if all
answers of a prompt are equal. A row has the hit rate, the speed over synchronous rounds with its 95 % interval, and the
prediction of `betoken.common.economy.speedup` from the costs of the synchronous answers and that hit rate. The last
stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from betoken.bench.command import exit_status, positive, temperature
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.paired_ratio import estimate
from betoken.bench.prompts import OWN_PROMPTS, Prompt, load_prompts
from betoken.bench.stack import POLL_INTERVAL_S, Stack
from betoken.bench.streams import generate, sampling, speculation
from betoken.cli.local_services import ROUTER_MODULE, LocalServicesConfig
from betoken.cli.measured import measured
from betoken.cli.service_process import ServiceProcess
from betoken.client import AsyncClient, Completion, RetryPolicy
from betoken.common.economy import speedup
from betoken.common.economy.plan import DraftKind

START_TIMEOUT_S = 120.0
PLAIN, SYNCHRONOUS = "plain", "synchronous"
Answers = Mapping[str | int, list[Completion]]
"""Completions of all prompts by side; the side of an overlapped router is its fan-out."""


async def answers(
    clients: Mapping[str | int, AsyncClient], prompts: Sequence[Prompt], heat: float, options: argparse.Namespace
) -> Answers:
    """Ask every side for every prompt.

    Raises:
        ValueError: answers differ.
    """
    found: dict[str | int, list[Completion]] = {name: [] for name in clients}
    for number, prompt in enumerate(prompts):
        shift = number % len(clients)
        for name in [*list(clients)[shift:], *list(clients)[:shift]]:
            settings = sampling(options.max_new_tokens, heat, seed=number, ignore_eos=True)
            how = speculation("none") if name == PLAIN else speculation("model", options.num_draft_tokens)
            found[name].append((await generate(clients[name], prompt.text, settings, how)).completion)
        if len({tuple(one[-1].output_ids) for one in found.values()}) > 1:
            raise ValueError(f"answers to prompt {prompt.index} differ at T = {heat:g}")
        print(f"T = {heat:g}: {number + 1} of {len(prompts)} prompts", file=sys.stderr)
    return found


def rows(found: Answers, heat: float, num_draft_tokens: int, kind: DraftKind) -> list[dict[str, Any]]:
    """Return a row for each fan-out."""
    base = measured(found[PLAIN], found[SYNCHRONOUS], num_draft_tokens, 0.0, kind)
    costs = base.inputs.costs(num_draft_tokens)
    table = []
    for name, completions in found.items():
        if name in (PLAIN, SYNCHRONOUS):
            continue
        own = measured(found[PLAIN], completions, num_draft_tokens, 0.0, kind)
        pairs = zip(completions, found[SYNCHRONOUS], strict=True)
        ratio = estimate([tokens_per_s(one) / tokens_per_s(other) for one, other in pairs])
        round_time = speedup.overlapped_round_time(num_draft_tokens, costs, own.inputs.hit_rate)
        row = {"temperature": heat, "fan_out": name, "num_pairs": ratio.num_pairs, "hit_rate": own.inputs.hit_rate}
        row |= {"over_synchronous": ratio.ratio, "low": ratio.low, "high": ratio.high}
        row |= {"predicted": speedup.synchronous_round_time(num_draft_tokens, costs) / round_time}
        row |= {"speedup": own.speedup, "synchronous_speedup": base.speedup}
        row |= {"verify_ratio": base.verify_ratio, "draft_ratio": base.inputs.draft_ratio}
        table.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return table


def tokens_per_s(completion: Completion) -> float:
    """Return the speed of an answer after its first token."""
    return (len(completion.output_ids) - 1) / (completion.duration_s - completion.time_to_first_token_s)


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    lines = ["| T | fan-out | hit rate | over synchronous | 95 % interval | predicted | over decoding |"]
    lines.append("|---:|---:|---:|---:|---|---:|---:|")
    for row in table:
        interval = f"[{row['low']:.2f}, {row['high']:.2f}]"
        lines.append(
            f"| {row['temperature']:g} | {row['fan_out']} | {row['hit_rate']:.2f} | {row['over_synchronous']:.2f} "
            f"| {interval} | {row['predicted']:.2f} | {row['speedup']:.2f} |"
        )
    return "\n".join(lines)


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process, and the threads they start, to a core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


async def measure(options: argparse.Namespace) -> int:
    """Start the services, measure, print."""
    config = LocalServicesConfig(
        options.target,
        options.draft,
        drafters=("model",),
        verify_threads=1,
        router_options=("--no-drafts-must-pay", "--overlap", "off"),
    )
    table = []
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(Stack(config))
        workers = stack.services.services
        for core, name in zip(sorted(os.sched_getaffinity(0)), ("verify", "draft"), strict=False):
            pin(workers[name].pid, core)
        clients: dict[str | int, AsyncClient] = {PLAIN: stack.client, SYNCHRONOUS: stack.client}
        for fan_out in options.fan_out:
            clients[fan_out] = await _overlapped(workers, options.target, fan_out, exits)
        prompts = await stack.fitting(load_prompts(options.prompts), options.max_new_tokens, file=sys.stderr)
        prompts = prompts[:: max(1, len(prompts) // options.limit)][: options.limit]  # of all categories
        is_parallel = any(one.mask_token_id is not None for one in (await stack.client.model_info()).draft_workers)
        kind = DraftKind.PARALLEL if is_parallel else DraftKind.SEQUENTIAL
        for heat in options.heat:
            table += rows(await answers(clients, prompts, heat, options), heat, options.num_draft_tokens, kind)
    print(markdown(table))
    about = {"hardware": describe_hardware(), "versions": describe_versions(), "prompts": options.prompts.name}
    print(json.dumps({"bench": "overlapped_rounds"} | about | {"rows": table}))
    return 0


async def _overlapped(
    workers: Mapping[str, ServiceProcess], tokenizer: str, fan_out: int, exits: AsyncExitStack
) -> AsyncClient:
    """Start a further router, which drafts ahead for so many outcomes."""
    directory = exits.enter_context(tempfile.TemporaryDirectory())
    arguments = ["--verify", workers["verify"].address, "--draft", workers["draft"].address, "--tokenizer", tokenizer]
    arguments += ["--no-drafts-must-pay", "--router-id", f"fan-out-{fan_out}"]
    arguments += ["--overlap", "on", "--overlap-outcomes", str(fan_out)]
    router = ServiceProcess(f"router-{fan_out}", ROUTER_MODULE, arguments, directory=Path(directory))
    router.start()
    exits.callback(router.kill)
    async with asyncio.timeout(START_TIMEOUT_S):
        while not router.is_ready():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(POLL_INTERVAL_S)
        client = AsyncClient(router.address, retry=RetryPolicy(max_retries=0))
        exits.push_async_callback(client.close)
        while "model" not in (await client.model_info()).drafters:  # noqa: ASYNC110 - its link to the draft worker
            await asyncio.sleep(POLL_INTERVAL_S)
    return client


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.overlapped_rounds", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="target model: directory, GGUF file or hub id")
    add("--draft", required=True, help="draft model: directory, GGUF file or hub id")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--limit", type=positive, default=15, help="number of prompts")
    add("--max-new-tokens", type=positive, default=64, help="tokens per answer")
    add("--num-draft-tokens", type=positive, default=5, help="tokens per draft")
    add("--fan-out", nargs="+", type=positive, default=[1, 2, 3, 8], help="outcomes to draft ahead for")
    add("--temperatures", dest="heat", nargs="+", type=temperature, default=[0.0, 0.8], help="0 = greedy")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    options = parse_options(arguments)
    return exit_status("betoken.bench.overlapped_rounds", lambda: asyncio.run(measure(options)))


if __name__ == "__main__":
    sys.exit(main())
