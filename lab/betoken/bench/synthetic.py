"""Measured speed-up of synthetic workers compared with the formulas of `betoken plan`, without and with overlap.

    python -m betoken.bench.synthetic --target DIR

Verify and draft worker simulate given step times, acceptance, hit rate and link; router, links and protocol are real.
Each answer is generated without speculation, by synchronous and by overlapped rounds, one after the other; no figure is
printed unless tokens are equal. Workers sleep, so other load disturbs only the wake-ups; `--realtime` gives the
services real-time priority (needs the privilege), which keeps these short on a busy machine. The last stdout line is
one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betoken.bench.command import exit_status, positive
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.stack import Stack
from betoken.bench.streams import generate, sampling, speculation
from betoken.cli.local_services import ROUTER_MODULE, LocalServicesConfig
from betoken.cli.service_process import ServiceFailedError, ServiceProcess
from betoken.client import AsyncClient, Completion, RetryPolicy
from betoken.common.economy.plan import PlanInputs
from betoken.common.economy.speedup import (
    RoundCosts,
    expected_block_length,
    overlapped_round_time,
    synchronous_round_time,
)
from betoken.common.synthetic import probability
from betoken.rpc.server import loop_factory

PROMPT = "def f("
DRAFTER = "synthetic"
_TEMPERATURE = 0.8
_READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cell:
    """Sums over the answers of one way of generating."""

    ms_per_token: float
    block_length: float
    """Tokens per verify forward."""
    verify_ms: float
    """Mean verify forward."""
    draft_ms: float
    """Mean drafting time of a round that begins without a draft made ahead."""
    overhead_ms: float
    """Mean of the answers' medians of the round time in neither worker."""
    hit_rate: float

    @classmethod
    def of(cls, answers: Sequence[Completion]) -> "Cell":
        """The means over answers."""
        stats = [answer.speculation for answer in answers]
        seconds = sum(answer.duration_s - answer.time_to_first_token_s for answer in answers)
        num_forwards = sum(one.num_verify_forwards for one in stats)
        num_outcomes = sum(one.num_ahead_hits + one.num_ahead_misses for one in stats)
        hit_rate = sum(one.num_ahead_hits for one in stats) / num_outcomes if num_outcomes else 0.0
        num_drafted = sum(one.num_rounds - one.num_ahead_hits - 1 for one in stats)
        draft_s = sum(one.draft_forward_s - one.first_draft_forward_s for one in stats)
        return cls(
            1e3 * seconds / sum(len(answer.output_ids) - 1 for answer in answers),
            sum(one.num_emitted_tokens for one in stats) / num_forwards,
            1e3 * sum(one.verify_forward_s for one in stats) / num_forwards,
            1e3 * draft_s / max(1, num_drafted),
            1e3 * sum(one.router_overhead_p50_s for one in stats) / len(stats),
            hit_rate,
        )


def compared(plain: Cell, drafted: Cell, inputs: PlanInputs, num_tokens: int, is_overlapped: bool) -> dict[str, float]:
    """The measured speed-up, the formula's, and the formula's with measured times in place of the nominal ones.

    `ratio` is measured by planned speed-up. `time_ratio` is the same for the block length that was drawn: few answers
    draw another one than expected.
    """
    speedup = plain.ms_per_token / drafted.ms_per_token
    expected = expected_block_length(inputs.acceptance, num_tokens)
    round_time = _round_time(inputs.costs(num_tokens), num_tokens, inputs.hit_rate if is_overlapped else None)
    planned = expected / round_time
    hop = drafted.overhead_ms / 2 / plain.ms_per_token
    draft = drafted.draft_ms / num_tokens / plain.ms_per_token
    costs = RoundCosts(draft, drafted.verify_ms / plain.ms_per_token, hop, hop)
    explained = drafted.block_length / _round_time(costs, num_tokens, drafted.hit_rate if is_overlapped else None)
    return {
        "speedup": round(speedup, 3),
        "formula": round(planned, 3),
        "ratio": round(speedup / planned, 3),
        "time_ratio": round(speedup * round_time / drafted.block_length, 3),
        "formula_of_measured_times": round(explained, 3),
        "block_length": round(drafted.block_length, 3),
        "hit_rate": round(drafted.hit_rate, 3),
        "overhead_ms": round(drafted.overhead_ms, 3),
    }


def _round_time(costs: RoundCosts, num_tokens: int, hit_rate: float | None) -> float:
    if hit_rate is None:
        return synchronous_round_time(num_tokens, costs)
    return overlapped_round_time(num_tokens, costs, hit_rate)


@asynccontextmanager
async def overlapping_router(stack: Stack, target: str) -> AsyncIterator[tuple[ServiceProcess, AsyncClient]]:
    """A second router over the workers of `stack`, with overlapped rounds."""
    services = stack.services.services
    options = ["--verify", services["verify"].address, "--draft", services["draft"].address, "--tokenizer", target]
    options += ["--router-id", "overlapping", "--no-drafts-must-pay", "--overlap", "on"]
    directory = Path(services["verify"].address.removeprefix("unix:")).parent
    service = ServiceProcess("overlapping", ROUTER_MODULE, options, directory=directory)
    service.start()
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while not service.is_ready():  # noqa: ASYNC110 - a file of another process
                await asyncio.sleep(0.05)
        async with AsyncClient(service.address, retry=RetryPolicy(max_retries=0)) as client:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while not (await client.model_info()).drafters:  # noqa: ASYNC110 - its link to the draft worker
                    await asyncio.sleep(0.05)
            yield service, client
    except TimeoutError:
        raise ServiceFailedError(
            service.name, f"did not serve within {_READY_TIMEOUT_S:g} s", service.log_tail()
        ) from None
    finally:
        service.terminate()
        await asyncio.to_thread(service.wait, 15.0)
        service.kill()


def use_realtime_priority(pids: Sequence[int]) -> None:
    """Give all threads of these processes real-time priority.

    Raises:
        PermissionError: this process may not.
    """
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(task), os.SCHED_FIFO, os.sched_param(1))


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all combinations.

    Raises:
        RuntimeError: tokens differ.
    """
    link = f"link_ms={options.hop_ms}"
    config = LocalServicesConfig(
        options.target,
        drafters=(DRAFTER,),
        verify_threads=1,
        verify_options=("--synthetic", f"step_ms={options.target_step_ms} {link}"),
        draft_options=("--synthetic", f"step_ms={options.draft_step_ms} {link}"),
        router_options=("--no-drafts-must-pay", "--overlap", "off"),
    )
    async with Stack(config) as stack, overlapping_router(stack, options.target) as (router, client):
        if options.realtime:
            pids = [service.pid for service in (*stack.services.services.values(), router)]
            use_realtime_priority([os.getpid(), *(pid for pid in pids if pid is not None)])
        rows = []
        for acceptance in options.acceptance:
            rows += await _measure(options, stack.client, client, acceptance, report)
    return {
        "synthetic": True,
        "target_step_ms": options.target_step_ms,
        "draft_step_ms": options.draft_step_ms,
        "hop_ms": options.hop_ms,
        "num_draft_tokens": options.num_draft_tokens,
        "realtime": options.realtime,
        "rows": rows,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }


async def _measure(
    options: argparse.Namespace,
    synchronous: AsyncClient,
    overlapping: AsyncClient,
    acceptance: float,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One acceptance: answers without speculation, by synchronous rounds, and by overlapped rounds of each hit rate."""
    num_tokens = options.num_draft_tokens
    answers: dict[float | str, list[Completion]] = {}
    for seed in range(options.repeats):
        ways: list[tuple[float | str, AsyncClient, dict[str, str]]] = [("none", synchronous, {})]
        ways.append(("synchronous", synchronous, {"acceptance": str(acceptance)}))
        for hit_rate in options.hit_rate:
            settings = {"acceptance": str(acceptance), "hit_rate": str(hit_rate)}
            ways.append((hit_rate, overlapping, settings))
        for name, client, settings in ways:
            how = speculation(DRAFTER if settings else "none", num_tokens if settings else None, settings=settings)
            params = sampling(options.max_new_tokens, _TEMPERATURE, seed=seed, ignore_eos=True)
            answer = (await generate(client, PROMPT, params, how)).completion
            answers.setdefault(name, []).append(answer)
            if answer.output_ids != answers["none"][seed].output_ids:
                raise RuntimeError(f"acceptance {acceptance:g}, seed {seed}: tokens of {name} differ from decoding")
    plain = Cell.of(answers.pop("none"))
    rows: list[dict[str, Any]] = []
    for name, of_way in answers.items():
        is_overlapped = name != "synchronous"
        inputs = PlanInputs(
            target_step_ms=options.target_step_ms,
            draft_step_ms=options.draft_step_ms,
            acceptance=acceptance,
            rtt_ms=options.hop_ms,
            hit_rate=float(name) if is_overlapped else 0.0,
        )
        row: dict[str, Any] = {"acceptance": acceptance, "assumed_hit_rate": name if is_overlapped else None}
        row |= compared(plain, Cell.of(of_way), inputs, num_tokens, is_overlapped)
        row["over_synchronous"] = round(row["speedup"] / rows[0]["speedup"], 3) if is_overlapped else 1.0
        rows.append(row)
        report(" ".join(f"{key} {value}" for key, value in row.items() if value is not None))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if tokens differ, 2 if nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.synthetic", description=__doc__)
    add = parser.add_argument
    add("--target", default="models/target", help="model whose tokenizer and context the synthetic target has")
    add("--target-step-ms", type=float, default=20.0, help="forward of the target")
    add("--draft-step-ms", type=float, default=2.0, help="forward of the drafter")
    add("--hop-ms", type=float, default=0.2, help="round trip of the simulated links")
    add("--num-draft-tokens", type=positive, default=5, help="tokens per draft")
    add("--acceptance", type=probability, nargs="+", default=[0.6, 0.7, 0.8, 0.9])
    add("--hit-rate", type=probability, nargs="+", default=[0.5, 0.8, 1.0])
    add("--max-new-tokens", type=positive, default=400, help="tokens per answer")
    add("--repeats", type=positive, default=3, help="answers per way, with other seeds")
    add("--realtime", action="store_true", help="give the services real-time priority")
    options = parser.parse_args(arguments)
    return exit_status("betoken.bench.synthetic", lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            result = runner.run(run(options, lambda line: print(line, flush=True)))
    except ServiceFailedError:
        raise
    except RuntimeError as error:
        print(f"python -m betoken.bench.synthetic: {error}: no figures", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
