"""End-to-end speed: Betoken over gRPC and `transformers` `generate()`, interleaved prompt by prompt in one run.

    python -m betoken.bench.end_to_end --target DIR --draft DIR --prompts FILE --drafter model --dtype bfloat16

Speeds are per stream, in tokens per second of wall time, prefill included. No speed is printed unless every sequence is
identical: Betoken with and without speculation (twice with it where --mode lets tokens depend on the draft), and in
greedy float32 Betoken and `generate()` (near-ties excused).
The last stdout line is one JSON object.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from betoken.bench.baseline import ASSISTED, BASELINE_NAMES, PLAIN, Baseline, BaselineRun, BaselineSampling
from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status
from betoken.bench.end_to_end_options import EndToEndOptions, parse_options
from betoken.bench.identity_check import IdentityCount, compare_equal, compare_with_transformers
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.matrix import NO_DRAFTER
from betoken.bench.prompts import Prompt, load_prompts
from betoken.bench.speculation_totals import (
    acceptance_per_position,
    acceptance_rate,
    block_efficiency,
    draft_forwards_per_round,
    round_times,
)
from betoken.bench.stack import Stack
from betoken.bench.streams import generate, run_bounded, sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from betoken.cli.report import TimedCompletion
from betoken.client import ModelInfo

BETOKEN, BETOKEN_OFF = "betoken", "betoken_off"
TRIAL_TOKENS = 48


@dataclass(slots=True)
class Measurements:
    """Results of the run: tokens per second by side, one entry per prompt and repeat, and identity counts."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    drafted: list[TimedCompletion] = field(default_factory=list)
    identity: IdentityCount = field(default_factory=IdentityCount)
    concurrent: dict[str, Any] | None = None

    def add_speed(self, side: str, num_tokens: int, seconds: float) -> None:
        self.tokens_per_s.setdefault(side, []).append(num_tokens / seconds)


async def measure(
    options: EndToEndOptions, stack: Stack, baseline: Baseline | None, prompts: list[Prompt]
) -> Measurements:
    """Warm both sides, then time all sides prompt by prompt; one side runs at a time."""
    measurements = Measurements()
    await _warm_up(options, stack, baseline, prompts)
    for repeat in range(options.repeats):
        for prompt in prompts:
            await _measure_prompt(options, stack, baseline, prompt, measurements)
        print(f"pass {repeat + 1} of {options.repeats} done", file=sys.stderr)
    if options.concurrency > 1:
        measurements.concurrent = await measure_concurrent(options, stack, prompts, measurements.identity)
    return measurements


async def _warm_up(options: EndToEndOptions, stack: Stack, baseline: Baseline | None, prompts: list[Prompt]) -> None:
    for prompt in prompts[:2]:
        for drafter in (options.asked, NO_DRAFTER):
            await _betoken(options, stack, drafter, prompt)
    if baseline is not None:
        methods = [method for method in BASELINE_NAMES if method != ASSISTED or options.draft]
        best = await asyncio.to_thread(baseline.choose_num_threads, methods, prompts[0].text, TRIAL_TOKENS)
        print(f"transformers, best number of threads: {best}")


async def _measure_prompt(
    options: EndToEndOptions, stack: Stack, baseline: Baseline | None, prompt: Prompt, measurements: Measurements
) -> None:
    drafted = await _betoken(options, stack, options.asked, prompt)
    plain = await _betoken(options, stack, NO_DRAFTER, prompt)
    measurements.drafted.append(drafted)
    for side, timed in ((BETOKEN, drafted), (BETOKEN_OFF, plain)):
        measurements.add_speed(side, len(timed.completion.output_ids), timed.seconds)
    reference = plain if options.is_drafted_as_plain else await _betoken(options, stack, options.asked, prompt)
    measurements.identity.add(compare_equal(prompt, drafted.completion, reference.completion))
    if baseline is None:
        return
    runs: dict[str, BaselineRun] = {}
    for method in baseline.num_threads:
        run = await asyncio.to_thread(baseline.generate, method, prompt.text, options.max_new_tokens, seed=prompt.index)
        measurements.add_speed(BASELINE_NAMES[method], len(run.ids), run.seconds)
        runs[method] = run
    if options.is_comparable_with_transformers:
        verdict = await compare_with_transformers(prompt, drafted.completion, runs[PLAIN], stack.client, baseline)
        measurements.identity.add(verdict, with_transformers=True)


async def measure_concurrent(
    options: EndToEndOptions, stack: Stack, prompts: list[Prompt], identity: IdentityCount
) -> dict[str, Any]:
    """Total tokens per second of concurrent streams, at least four requests per stream; sides alternate."""
    requests = [prompts[i % len(prompts)] for i in range(max(len(prompts), 4 * options.concurrency))]
    totals: dict[str, list[float]] = {BETOKEN: [], BETOKEN_OFF: []}
    drafted: list[TimedCompletion] = []
    for _ in range(options.repeats):
        answers: list[list[TimedCompletion]] = []
        for side, drafter in ((BETOKEN, options.asked), (BETOKEN_OFF, NO_DRAFTER)):
            start = asyncio.get_running_loop().time()
            timed = await run_bounded(requests, partial(_betoken, options, stack, drafter), options.concurrency)
            seconds = asyncio.get_running_loop().time() - start
            totals[side].append(sum(len(answer.completion.output_ids) for answer in timed) / seconds)
            answers.append(timed)
        drafted += answers[0]
        for prompt, ours, plain in zip(requests, *answers, strict=True):
            if not options.is_drafted_as_plain:
                continue  # each prompt was compared with its repetition, one stream at a time
            identity.add(compare_equal(prompt, ours.completion, plain.completion))
    overhead_ms = _router_overhead_ms(drafted)
    return {
        "streams": options.concurrency,
        **{side: round(median(speeds), 1) for side, speeds in totals.items()},
        "router_overhead_ms": {
            "p50": overhead_ms,
            "per_sequence": None if overhead_ms is None else round(overhead_ms / options.concurrency, 4),
        },
    }


def _router_overhead_ms(drafted: Sequence[TimedCompletion]) -> float | None:
    """Median over answers of the median over an answer's rounds; None without drafts."""
    stats = [answer.completion.speculation for answer in drafted]
    overheads = [s.router_overhead_p50_s for s in stats if s.num_drafts]
    return round(1000 * median(overheads), 3) if overheads else None


async def _betoken(options: EndToEndOptions, stack: Stack, drafter: str, prompt: Prompt) -> TimedCompletion:
    return await generate(
        stack.client,
        prompt.text,
        sampling(options.max_new_tokens, options.temperature, options.top_p, seed=prompt.index),
        speculation(drafter, options.num_draft_tokens, options.mode, settings=options.drafter_settings),
    )


def report(options: EndToEndOptions, measurements: Measurements, info: ModelInfo) -> dict[str, Any]:
    """The JSON object; speeds only when identity held."""
    stats = [timed.completion.speculation for timed in measurements.drafted]
    identity = measurements.identity
    result: dict[str, Any] = {
        "options": options.as_json(),
        "num_prompts": len({timed.completion.prompt_ids for timed in measurements.drafted}),
        "identical": identity.identical,
        "compared": identity.compared,
        "near_ties": identity.near_ties,
    }
    if identity.holds:
        result |= {
            "tokens_per_s": {side: round(median(speeds), 1) for side, speeds in measurements.tokens_per_s.items()},
            "concurrent_tokens_per_s": measurements.concurrent,
            "block_efficiency": block_efficiency(stats),
            "acceptance_rate": acceptance_rate(stats),
            "acceptance_per_position": acceptance_per_position(stats),
            "draft_forwards_per_round": draft_forwards_per_round(stats),
            "round_ms": round_times(stats),
            "router_overhead_ms": {"p50": _router_overhead_ms(measurements.drafted)},
            "target_step_ms": _step_times(info),
        }
    return result | {"hardware": describe_hardware(), "versions": describe_versions()}


def _step_times(info: ModelInfo) -> dict[str, float]:
    costs = info.verify_workers[0].step_costs
    return {str(cost.rows): round(1000 * cost.time_s, 3) for cost in costs if cost.context == costs[0].context}


def _print_table(result: dict[str, Any], num_threads: dict[str, int]) -> None:
    speeds: dict[str, float] = result["tokens_per_s"]
    plain = speeds.get(BASELINE_NAMES[PLAIN])
    print(f"\n{'side':<28}{'tokens/s':>10}{'x plain':>9}{'threads':>9}")
    threads = {BASELINE_NAMES[method]: n for method, n in num_threads.items()}
    for side, speed in speeds.items():
        print(f"{side:<28}{speed:>10.1f}{f'{speed / plain:.2f}' if plain else '':>9}{threads.get(side, ''):>9}")
    print(f"\nblock efficiency {result['block_efficiency']}, acceptance rate {result['acceptance_rate']}, ", end="")
    print(f"draft forwards per round {result['draft_forwards_per_round']}, ", end="")
    print(f"router overhead p50 {result['router_overhead_ms']['p50']} ms")
    print("target step, rows: ms  " + "  ".join(f"{rows}: {ms}" for rows, ms in result["target_step_ms"].items()))


async def run(options: EndToEndOptions) -> int:
    """Measure, print, and return the exit status: 1 when a sequence differed, 2 when there was nothing to measure."""
    prompts = load_prompts(options.prompts, options.limit)
    services = LocalServicesConfig(
        target=options.target,
        draft=options.draft or "",
        weights=options.models,
        drafters=options.hosted_drafters,
        attached_drafters=options.attached_drafters,
        dtype=options.dtype,
        verify_threads=options.verify_threads,
        draft_threads=options.draft_threads,
        compile=options.compile,
        prefix_caching=False,  # the same prompts are asked again and again
        verify_options=options.verify_options,
        draft_options=options.draft_options,
    )
    sampling = BaselineSampling(options.temperature, options.top_p)
    async with Stack(services) as stack:
        info = await stack.client.model_info()
        prompts = await stack.fitting(prompts, options.max_new_tokens)
        if not prompts:
            print(f"no prompt fits the context with --max-new-tokens {options.max_new_tokens}", file=sys.stderr)
            return EXIT_NOTHING_MEASURED
        if options.no_transformers:
            measurements, num_threads = await measure(options, stack, None, prompts), {}
        else:
            with Baseline(options.target, options.draft, options.dtype, sampling, options.device) as baseline:
                measurements, num_threads = await measure(options, stack, baseline, prompts), baseline.num_threads
    result = report(options, measurements, info)
    for line in measurements.identity.differences:
        print(line)
    if measurements.identity.holds:
        _print_table(result, num_threads)
    else:
        print("identity failed: no speeds")
    print(json.dumps(result | {"transformers_num_threads": {BASELINE_NAMES[m]: n for m, n in num_threads.items()}}))
    return 0 if measurements.identity.holds else 1


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.end_to_end", lambda: asyncio.run(run(parse_options()))))
