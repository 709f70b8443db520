"""The demo: three local services, one completion with and without speculation, and a comparison of both.

    python -m betoken.bench.demo

Speeds are medians over alternating repeats, of the services with and without speculation. Equality is checked
twice: against plain decoding in the served dtype, and in float32 against `transformers` `generate()`. If a token
differs, no speed is printed. The last stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from betoken.bench.baseline import PLAIN, Baseline, BaselineSampling
from betoken.bench.command import exit_status, positive, temperature
from betoken.bench.identity_check import Comparison, Outcome, compare_with_transformers
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.matrix import NO_DRAFTER
from betoken.bench.prompts import OWN_PROMPTS, Prompt, load_prompts
from betoken.bench.speculation_totals import acceptance_rate, block_efficiency
from betoken.bench.streams import TimedCompletion, generate, sampling, speculation
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.cli.provenance import Provenance, visible
from betoken.client import AsyncClient, Client, Sampling, Token

_PROMPT = 2
"""Which of the benchmark's own: the small model writes code there, and drafts gain about what they do on HumanEval."""


class Demo:
    """Results of one run of the demo."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self._prompt: str = options.prompt or load_prompts(OWN_PROMPTS, _PROMPT + 1)[_PROMPT].text

    def run(self) -> dict[str, Any]:
        """Show, measure, check; the JSON object."""
        with self._services(self._options.dtype, "auto") as address, Client(address) as client:
            self._warm_up(client)
            self._show(client)
            pairs = [(self._answer(client, True), self._answer(client, False)) for _ in range(self._options.repeats)]
        own = all(drafted.completion.output_ids == plain.completion.output_ids for drafted, plain in pairs)
        comparison = self._check_against_transformers()
        target = comparison.outcome is not Outcome.DIFFERENT
        stats = [drafted.completion.speculation for drafted, _ in pairs]
        result = {
            "identical_to_target": own and target,
            "checked_against": {
                f"own decoding without speculation, {self._options.dtype}": own,
                "transformers generate(), float32": target,
            },
            **(_speeds(pairs) if own and target else {}),
            "block_efficiency": block_efficiency(stats),
            "acceptance_rate": acceptance_rate(stats),
            "drafter": self._options.drafter,
            "dtype": self._options.dtype,
            "num_new_tokens": len(pairs[0][0].completion.output_ids),
            "repeats": len(pairs),
            "hardware": describe_hardware(),
            "versions": describe_versions(),
        }
        self._print_verdict(result, comparison.detail)
        return result

    @contextmanager
    def _services(self, dtype: str, compile: str) -> Iterator[str]:
        """The router's address of running services of one dtype; their start is shown."""
        models = (self._options.target, self._options.draft)
        config = LocalServicesConfig(*models, dtype=dtype, compile=compile, prefix_caching=False)  # asks over and over
        with Status(f"starting router, verify worker and draft worker ({dtype})", console=self._console) as status:
            services = LocalServices(
                config, lambda name, progress: status.update(f"{name}: {progress.stage} {progress.fraction:.0%}")
            )
            services.start()
        try:
            yield services.address
        finally:
            services.stop()

    def _sampling(self) -> Sampling:
        return sampling(self._options.max_new_tokens, self._options.temperature, seed=0)

    def _warm_up(self, client: Client) -> None:
        for is_drafted in (True, False):
            self._answer(client, is_drafted)

    def _answer(self, client: Client, is_drafted: bool) -> TimedCompletion:
        how = speculation(self._options.drafter if is_drafted else NO_DRAFTER)
        start = perf_counter()
        completion = client.complete(self._prompt, sampling=self._sampling(), speculation=how)
        return TimedCompletion(completion, perf_counter() - start)

    def _show(self, client: Client) -> None:
        """Stream both completions into two columns, tokens coloured by their source."""
        prompt = Text(visible(self._prompt.rstrip("\n")), "dim")
        shown = Provenance(self._console, client.model_info().sources)
        self._console.print(Text("asked to go on from", "bold"), prompt, sep="\n", end="\n\n")
        columns = {"with speculation": Text(), "without": Text()}
        tokens: list[Token] = []
        with Live(_beside(columns), console=self._console, auto_refresh=False) as live:
            for column, drafter in zip(columns.values(), (self._options.drafter, NO_DRAFTER), strict=True):
                answer = client.generate(self._prompt, sampling=self._sampling(), speculation=speculation(drafter))
                for piece in answer:
                    for token in piece.tokens:
                        column.append(visible(token.text), shown.style(token.provenance))
                    live.update(_beside(columns), refresh=True)
                tokens += answer.result().tokens if drafter != NO_DRAFTER else ()
        self._console.print()
        self._console.print(shown.legend(tokens))

    def _check_against_transformers(self) -> Comparison:
        """Float32 greedy speculation compared with `generate()`."""
        with (
            self._services("float32", "off") as address,
            Status("asking transformers", console=self._console),
            Baseline(self._options.target, None, "float32", BaselineSampling(), is_timed=False) as baseline,
        ):
            return asyncio.run(self._compare(address, baseline))

    async def _compare(self, address: str, baseline: Baseline) -> Comparison:
        greedy = sampling(self._options.max_new_tokens, temperature=0)
        async with AsyncClient(address) as client:
            ours = await generate(client, self._prompt, greedy, speculation(self._options.drafter))
            theirs = baseline.generate(PLAIN, self._prompt, self._options.max_new_tokens)
            return await compare_with_transformers(Prompt(0, self._prompt), ours.completion, theirs, client, baseline)

    def _print_verdict(self, result: dict[str, Any], difference: str) -> None:
        for what, is_equal in result["checked_against"].items():
            self._console.print(f"{'equal to' if is_equal else 'DIFFERS from'} {what}")
        if difference:
            self._console.print(f"transformers: {difference}")
        if not result["identical_to_target"]:
            self._console.print("identity failed: no speeds")
            return
        faster = result["tokens_per_s"] / result["autoregressive_tokens_per_s"]
        self._console.print(
            f"{result['tokens_per_s']} tokens/s with speculation, {result['autoregressive_tokens_per_s']} without "
            f"({faster:.2f} x); {result['block_efficiency']} tokens per target forward, "
            f"{result['acceptance_rate']:.0%} of the guesses accepted"
        )


def _speeds(pairs: Sequence[tuple[TimedCompletion, TimedCompletion]]) -> dict[str, float]:
    """Median tokens per second with speculation and without."""
    return {
        "tokens_per_s": round(median(drafted.tokens_per_s for drafted, _ in pairs), 1),
        "autoregressive_tokens_per_s": round(median(plain.tokens_per_s for _, plain in pairs), 1),
    }


def _beside(columns: dict[str, Text]) -> Table:
    table = Table(*columns, expand=True)
    table.add_row(*columns.values())
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 1 when a token differed, 2 when it could not run."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.demo", description=__doc__)
    add = parser.add_argument
    add("--target", default="models/target", help="target model: directory or hub id")
    add("--draft", default="models/draft", help="draft model: directory or hub id")
    add("--prompt", help="text to complete (default: one of the benchmark's own)")
    add("--drafter", default="fused", choices=("fused", "model", "ngram", "staged"), help="who guesses")
    add("--max-new-tokens", type=positive, default=128, help="tokens of the completion")
    add("--temperature", type=temperature, default=0.0, help="0 = greedy")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of both models")
    add("--repeats", type=positive, default=5, help="timed repeats of each side")
    options = parser.parse_args(arguments)
    if options.target == "models/target" and not Path(options.target).exists():
        parser.error("models/target is not here: run from the repository's root, or name --target and --draft")
    return exit_status("betoken.bench.demo", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    result = Demo(options, Console()).run()
    print(json.dumps(result))
    return 0 if result["identical_to_target"] else 1


if __name__ == "__main__":
    sys.exit(main())
