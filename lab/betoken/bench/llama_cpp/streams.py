"""One greedy stream: our services and llama.cpp on a GGUF file, without speculation and with prompt lookup, in turn.

    python -m betoken.bench.llama_cpp.streams --target FILE.gguf [--prompts FILE] [--drafter ngram@attached]

llama.cpp runs the file itself and the same weights in each of its `--formats`. Every prompt goes to all sides in an
order of chance. Seconds run from the prompt's text to the last token, ours through the router. No speed is printed
unless our tokens are the same with and without drafts. The last stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status, positive
from betoken.bench.drafter_names import drafter_named
from betoken.bench.identity_check import IdentityCount, compare_equal
from betoken.bench.llama_cpp.model import FORMATS, LlamaModel, load_library, open_models
from betoken.bench.machine import describe_hardware, describe_versions, num_cores
from betoken.bench.matrix import DTYPES, NO_DRAFTER
from betoken.bench.paired_ratio import best_by_median, estimate
from betoken.bench.prompts import OWN_PROMPTS, Prompt, load_prompts
from betoken.bench.stack import Stack
from betoken.bench.streams import generate, sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import Completion

BETOKEN, BETOKEN_OFF = "betoken", "betoken off"
LOOKUPS = (0, 4, 10)
"""Drafted tokens at most; 0 is plain decoding."""


class Sides:
    """All sides and their speeds, tokens per second, an entry for each prompt."""

    def __init__(self, options: argparse.Namespace, stack: Stack, models: dict[str, LlamaModel]) -> None:
        self._options, self._stack, self._models = options, stack, models
        self._rng = random.Random(0)
        self.names = [BETOKEN, BETOKEN_OFF, *(f"{name}, lookup {n}" for name in models for n in LOOKUPS)]
        self.speeds: dict[str, list[float]] = {name: [] for name in self.names}
        self.tokens_per_forward: dict[str, list[float]] = {}
        self.identity = IdentityCount()

    async def measure(self, prompt: Prompt) -> None:
        """All sides on one prompt, in an order of chance."""
        ours: dict[str, Completion] = {}
        for name in self._rng.sample(self.names, len(self.names)):
            if name in (BETOKEN, BETOKEN_OFF):
                ours[name] = await self._ask(prompt, name)
            else:
                self._generate(prompt, name)  # in the one thread: llama.cpp has threads for each that calls it
        self.identity.add(compare_equal(prompt, ours[BETOKEN], ours[BETOKEN_OFF]))

    async def _ask(self, prompt: Prompt, name: str) -> Completion:
        drafter = drafter_named(self._options.drafter)[0] if name == BETOKEN else NO_DRAFTER
        rules = sampling(self._options.max_new_tokens, temperature=0)
        timed = await generate(self._stack.client, prompt.text, rules, speculation(drafter))
        self.speeds[name].append(timed.tokens_per_s)
        return timed.completion

    def _generate(self, prompt: Prompt, name: str) -> None:
        model, _, lookup = name.partition(", lookup ")
        answer = self._models[model].generate(prompt.text, self._options.max_new_tokens, int(lookup))
        self.speeds[name].append(len(answer.ids) / answer.seconds)
        self.tokens_per_forward.setdefault(name, []).append(len(answer.ids) / answer.num_forwards)

    def report(self) -> dict[str, Any]:
        """Medians, and our ratio to the best of the other's sides with its interval; no speeds unless tokens agree."""
        identity = {"identical": self.identity.identical, "compared": self.identity.compared}
        if not self.identity.holds:
            return identity
        best = best_by_median({name: self.speeds[name] for name in self.names[2:]})
        ratio = estimate([ours / other for ours, other in zip(self.speeds[BETOKEN], self.speeds[best], strict=True)])
        return identity | {
            "tokens_per_s": {name: round(median(speeds), 1) for name, speeds in self.speeds.items()},
            "tokens_per_forward": {name: round(median(ones), 2) for name, ones in self.tokens_per_forward.items()},
            "best": best,
            "ratio": {"mean": round(ratio.ratio, 3), "low": round(ratio.low, 3), "high": round(ratio.high, 3)},
        }


async def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the status: 1 when our tokens differed, 2 when there was nothing to measure."""
    prompts = load_prompts(options.prompts, options.limit)
    library = load_library()
    drafter, is_attached = drafter_named(options.drafter)
    services = LocalServicesConfig(
        target=str(options.target),
        drafters=[] if is_attached else [drafter],
        attached_drafters=[drafter] if is_attached else [],
        dtype=options.dtype,
        compile=options.compile,
        prefix_caching=False,  # both drafted and plain ask for the same prompt
    )
    with open_models(library, options.target, options.formats, options.threads) as loaded:
        async with Stack(services) as stack:
            sides = Sides(options, stack, loaded)
            prompts = await stack.fitting(prompts, options.max_new_tokens)
            if not prompts:
                print("no prompt fits the context", file=sys.stderr)
                return EXIT_NOTHING_MEASURED
            warm_up = Sides(options, stack, loaded)
            await warm_up.measure(prompts[0])
            for prompt in prompts:
                await sides.measure(prompt)
                print(f"prompt {prompt.index} of {len(prompts)} done", file=sys.stderr)
    result = sides.report()
    for line in sides.identity.differences:
        print(line)
    for name, speed in result.get("tokens_per_s", {}).items():
        print(f"{name:<28}{speed:>8.1f} tokens/s")
    print(json.dumps({"bench": "llama_cpp.streams"} | result | _about(options)))
    return 0 if sides.identity.holds else 1


def _about(options: argparse.Namespace) -> dict[str, Any]:
    names = {"target": options.target.name, "prompts": options.prompts.name}
    return {"options": vars(options) | names, "hardware": describe_hardware(), "versions": describe_versions()}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.llama_cpp.streams", description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="GGUF file")
    add("--formats", nargs="*", choices=FORMATS, default=FORMATS, help="further formats for llama.cpp")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--limit", type=positive, default=16, help="only the first N prompts")
    add("--max-new-tokens", type=positive, default=96, help="tokens per answer")
    add("--drafter", choices=("ngram", "ngram@attached"), default="ngram@attached", help="ours")
    add("--dtype", choices=DTYPES, default="bfloat16", help="our activations")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile in our workers")
    add("--threads", type=positive, default=num_cores(), help="of llama.cpp")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.llama_cpp.streams", lambda: asyncio.run(run(parse_options()))))
