"""How much sooner the next turn of a conversation begins where workers keep the KV of the turns before.

    python -m betoken.bench.prefix_caching --target DIR --draft DIR --prompts FILE

Each conversation starts with a prompt and goes on with what was answered and the next prompt of the file. Services with
and without prefix caching run side by side and are asked in turn, so both take some of the other's machine. No figure
is printed unless all answers are the same. The last stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status, positive, temperature
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.matrix import FUSED, NO_DRAFTER
from betoken.bench.prompts import OWN_PROMPTS, load_prompts
from betoken.bench.sides import needs_draft_model
from betoken.bench.stack import Stack
from betoken.bench.streams import sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import AsyncClient, Completion

SIDES = {False: "without", True: "with"}


async def measure(
    clients: dict[bool, AsyncClient], texts: list[str], options: argparse.Namespace
) -> dict[bool, list[list[Completion]]]:
    """The answers of each side: by conversation, by turn."""
    answers: dict[bool, list[list[Completion]]] = {is_caching: [] for is_caching in clients}
    for index in range(len(texts)):
        for is_caching in sorted(clients, reverse=bool(index % 2)):
            answers[is_caching].append(await converse(clients[is_caching], texts[index:] + texts[:index], options))
    return answers


async def converse(client: AsyncClient, texts: list[str], options: argparse.Namespace) -> list[Completion]:
    """One conversation: as many turns as are asked for and fit the context."""
    how = sampling(options.max_new_tokens, options.temperature, seed=0, ignore_eos=True)
    max_context = (await client.model_info()).max_context
    answers: list[Completion] = []
    prompt_ids: list[int] = []
    for turn in range(options.turns):
        prompt_ids += await client.tokenize(texts[turn % len(texts)])
        if len(prompt_ids) + options.max_new_tokens > max_context:
            break
        answers.append(await client.complete(prompt_ids, sampling=how, speculation=speculation(options.drafter)))
        prompt_ids += answers[-1].output_ids
    return answers


def report(answers: dict[bool, list[list[Completion]]], options: argparse.Namespace) -> dict[str, Any]:
    """The JSON object; times only when both sides gave the same answers."""
    pairs = [
        (ours, other)
        for conversations in zip(answers[True], answers[False], strict=True)
        for ours, other in zip(*conversations, strict=True)
    ]
    num_identical = sum(ours.output_ids == other.output_ids for ours, other in pairs)
    names = {name: Path(getattr(options, name)).name for name in ("target", "draft", "prompts")}
    result: dict[str, Any] = {
        "options": vars(options) | names,
        "identical": num_identical,
        "compared": len(pairs),
    }
    if num_identical == len(pairs):
        result["turns"] = [_turn(answers, turn) for turn in range(max(map(len, answers[True])))]
    return result | {"hardware": describe_hardware(), "versions": describe_versions()}


def _turn(answers: dict[bool, list[list[Completion]]], turn: int) -> dict[str, Any]:
    """Medians over the conversations that came so far."""
    of_turn = {
        side: [conversation[turn] for conversation in answers[is_caching] if len(conversation) > turn]
        for is_caching, side in SIDES.items()
    }
    cached = of_turn[SIDES[True]]
    return {
        "conversations": len(cached),
        "prompt_tokens": median(answer.usage.prompt_tokens for answer in cached),
        "cached_prompt_tokens": median(answer.usage.cached_prompt_tokens for answer in cached),
        "time_to_first_token_ms": {
            side: _median_ms(answer.time_to_first_token_s for answer in completions)
            for side, completions in of_turn.items()
        },
        "duration_ms": {
            side: _median_ms(answer.duration_s for answer in completions) for side, completions in of_turn.items()
        },
    }


def _median_ms(seconds: Iterable[float]) -> float:
    return round(1000 * median(seconds), 1)


async def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit status: 1 when an answer differed, 2 when there was nothing to measure."""
    texts = [prompt.text for prompt in load_prompts(options.prompts, options.limit)]
    caching_config = LocalServicesConfig(
        options.target,
        options.draft,
        dtype=options.dtype,
        verify_threads=options.verify_threads,
        compile=options.compile,
    )
    async with Stack(replace(caching_config, prefix_caching=False)) as plain, Stack(caching_config) as caching:
        answers = await measure({False: plain.client, True: caching.client}, texts, options)
    if not any(answers[True]):
        print(f"no prompt fits the context with --max-new-tokens {options.max_new_tokens}", file=sys.stderr)
        return EXIT_NOTHING_MEASURED
    result = report(answers, options)
    for number, turn in enumerate(result.get("turns", ()), start=1):
        times = turn["time_to_first_token_ms"]
        print(
            f"turn {number}: {turn['prompt_tokens']:g} prompt tokens, {turn['cached_prompt_tokens']:g} of them cached; "
            f"first token after {times['with']} ms, {times['without']} without"
        )
    if "turns" not in result:
        print(f"{result['identical']} of {result['compared']} answers are the same: no times")
    print(json.dumps(result))
    return 0 if "turns" in result else 1


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.prefix_caching", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="target model: directory or hub id")
    add("--draft", default="", help="draft model: directory or hub id; for --drafter fused, model and staged")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--limit", type=positive, help="only the first N prompts; a conversation begins with each")
    add("--turns", type=positive, default=4, help="turns of a conversation")
    add("--max-new-tokens", type=positive, default=64, help="tokens per answer")
    add("--drafter", default=FUSED, choices=(NO_DRAFTER, FUSED, "model", "ngram", "staged"), help="who guesses")
    add("--temperature", type=temperature, default=0.0, help="0 = greedy")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile in the workers")
    add("--verify-threads", type=positive, help="CPU threads of each verify worker")
    options = parser.parse_args(arguments)
    if needs_draft_model(options.drafter) and not options.draft:
        parser.error(f"--drafter {options.drafter} needs --draft")
    return options


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.prefix_caching", lambda: asyncio.run(run(parse_options()))))
