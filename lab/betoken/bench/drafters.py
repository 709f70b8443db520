"""The drafter table: every drafter, plain decoding and `transformers`, interleaved prompt by prompt in one run.

    python -m betoken.bench.drafters --target DIR --draft DIR --prompts FILE --prompts FILE --out DIR

Finished prompts are kept in the --out folder, so that a long run can be made in pieces; --report prints what is there.
No speed is printed unless every drafter's every sequence equals plain decoding. Of `turns` the first is the prompt, as
plain text. Progress goes to stderr; the last stdout line is one JSON object.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from betoken.bench.baseline import Baseline, BaselineSampling
from betoken.bench.command import exit_status
from betoken.bench.drafters_options import DraftersOptions, parse_options
from betoken.bench.drafters_report import TOO_LONG, markdown, summarize, total_identity
from betoken.bench.drafters_runner import DraftersRunner
from betoken.bench.drafters_store import DraftersStore
from betoken.bench.machine import describe_hardware
from betoken.bench.prompts import fingerprint, load_prompts
from betoken.bench.stack import Stack
from betoken.engine.weights.sources import open_source


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; 1 when a sequence differed, 2 when nothing could be measured."""
    options = parse_options(arguments)
    return exit_status("betoken.bench.drafters", lambda: _run(options), kept=options.out)


def _run(options: DraftersOptions) -> int:
    store = DraftersStore.open(options.out) if options.report else asyncio.run(_measure(options))
    if not store.done:  # it was interrupted before the first prompt was through, or none fitted
        raise ValueError(f"{options.out} holds no measurements")
    return _report(store)


async def _measure(options: DraftersOptions) -> DraftersStore:
    """Start the services and `transformers`; measure what the store lacks."""
    prompts = {path.name: load_prompts(path) for path in options.prompts}
    fingerprints = {name: fingerprint(of_file) for name, of_file in prompts.items()}
    store = DraftersStore.open_for(options.out, _manifest(options), fingerprints)
    async with AsyncExitStack() as exits:
        stacks = {
            variant: await exits.enter_async_context(Stack(options.services(variant))) for variant in options.variants
        }
        baseline = None
        if not options.no_transformers:
            sampling = BaselineSampling(options.temperature, ignore_eos=True)
            models = (options.target, options.draft, options.dtype)
            baseline = exits.enter_context(Baseline(*models, sampling, options.device))
        await DraftersRunner(options, stacks, baseline, store).run(prompts)
    return store


def _manifest(options: DraftersOptions) -> dict[str, Any]:
    weights = {
        "target": open_source(options.target, None).fingerprint(),
        "draft": open_source(options.draft, None).fingerprint(),
    }
    hardware = describe_hardware()
    names = ("processor", "cores", "fast_wake", *(() if options.device == "cpu" else ("gpus",)))
    return weights | {name: hardware[name] for name in names} | options.decisive()


def _report(store: DraftersStore) -> int:
    result = summarize(store)
    identity = total_identity(list(store.done.values()))
    for line in identity.differences:
        print(line)
    if identity.holds:
        for group in result["groups"]:
            print(f"{markdown(group)}\n")
        for entry in result["left_out"]:
            print(f"**{entry['prompts']}, {entry['category']}**: all {entry['count']} prompts {TOO_LONG}\n")
    else:
        print("identity failed: no speeds")
    print(json.dumps(result))
    return 0 if identity.holds else 1


if __name__ == "__main__":
    sys.exit(main())
