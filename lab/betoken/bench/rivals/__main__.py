"""Our services and other engines' servers on a pair of GGUF files, in turn.

    python -m betoken.bench.rivals --target T.gguf --draft D.gguf --prompts FILE --llama-server PATH

All sides answer each group of prompts close in time, in random order; a group has a prompt for each stream. Speeds
are of whole answers, with their prompts. They are printed only if our answers with each drafter equal ours without
speculation. Answers of the other engines are compared with their own without speculation, and counted. Progress goes
to stderr; the last stdout line is one JSON object.
"""

import argparse
import json
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from betoken.bench.command import exit_status, positive
from betoken.bench.machine import describe_hardware, describe_versions, num_cores
from betoken.bench.paired_ratio import estimate
from betoken.bench.prompts import OWN_PROMPTS, load_prompts
from betoken.bench.rivals.servers import (
    LLAMA_KINDS,
    OPENVINO_KINDS,
    Answer,
    Load,
    OurConfig,
    Side,
    llama_side,
    openvino_side,
    our_sides,
)

OURS = {"none": {"off": True}, "default": {}} | {name: {"drafter": name} for name in ("ngram", "model", "fused")}
"""Options of our requests by name of the side."""
PLAIN = "betoken none"
WARM_UP_TOKENS = 8


class Rivals:
    """Measures all sides in turn."""

    def __init__(self, sides: Mapping[str, Side]) -> None:
        self._sides = sides
        self._random = random.Random(0)
        self.speeds: dict[str, list[float]] = {name: [] for name in sides}
        self.answers: dict[str, list[Answer]] = {name: [] for name in sides}

    def measure(self, prompts: Sequence[str]) -> None:
        """Let every side answer all prompts at once."""
        for name in self._random.sample(list(self._sides), len(self._sides)):
            with ThreadPoolExecutor(len(prompts)) as pool:
                start_s = perf_counter()
                answers = list(pool.map(self._sides[name], prompts))
                seconds = perf_counter() - start_s
            self.speeds[name].append(sum(answer.num_tokens for answer in answers) / seconds)
            self.answers[name] += answers

    def num_equal(self, name: str) -> int:
        """Count answers equal to the same engine's without speculation."""
        plain = self.answers.get(f"{name.split()[0]} none", [])
        return sum(one.text == other.text for one, other in zip(self.answers[name], plain, strict=False))

    def differing(self) -> list[str]:
        """Our sides with an answer that differs from ours without speculation."""
        total = len(self.answers.get(PLAIN, []))
        return [name for name in self.speeds if name.startswith("betoken ") and self.num_equal(name) < total]

    def report(self) -> list[dict[str, Any]]:
        """Rows, the fastest first: median speed, its ratio to llama.cpp's and to our own without speculation, and the
        latter as the speculation policy predicted it."""
        rows = []
        for name, speeds in self.speeds.items():
            per_forward = [one.tokens_per_forward for one in self.answers[name] if one.tokens_per_forward is not None]
            row: dict[str, Any] = {"side": name, "tokens_per_s": round(median(speeds), 2)}
            row |= {"tokens_per_forward": round(median(per_forward), 2) if per_forward else None}
            predicted = [one.predicted for one in self.answers[name] if one.predicted is not None]
            row |= {"predicted": round(median(predicted), 2) if predicted else None}
            row |= {"equal": self.num_equal(name), "compared": len(self.answers[name])}
            for other in (PLAIN, "llama.cpp none"):
                if base := self.speeds.get(other):
                    found = estimate([one / base_one for one, base_one in zip(speeds, base, strict=True)])
                    row[f"by {other}"] = [round(value, 3) for value in (found.ratio, found.low, found.high)]
            rows.append(row)
        return sorted(rows, key=lambda row: -row["tokens_per_s"])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    ratios = [name for name in rows[0] if name.startswith("by ")]
    head = ["side", "tokens/s", "tokens a forward", *(name.replace("by", "x") for name in ratios)]
    head += ["predicted", "equal to its plain"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = [row["side"], f"{row['tokens_per_s']:.1f}", f"{row['tokens_per_forward'] or ''}"]
        cells += ["{:.2f} [{:.2f}, {:.2f}]".format(*row[name]) for name in ratios]
        lines.append([*cells, f"{row['predicted'] or ''}", f"{row['equal']} of {row['compared']}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measure(options: argparse.Namespace) -> int:
    """Start all servers, measure, print; 1 if one of our answers differed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whichever ends it, the servers end too
    num_prompts = options.limit * max(options.streams)
    prompts = [prompt.text for prompt in load_prompts(options.prompts)]
    prompts = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]
    load = Load(
        options.target,
        options.draft,
        options.threads,
        options.max_new_tokens,
        max(options.streams),
        options.context,
        options.chat,
    )
    results, has_difference = {}, False
    with ExitStack() as stack:
        sides = _started(options, load, stack)
        for num_streams in options.streams:
            bench = Rivals(sides)
            Rivals(sides).measure([prompts[0][:200]] * num_streams)
            for number in range(options.limit):
                first = number * num_streams % len(prompts)
                bench.measure([prompts[(first + index) % len(prompts)] for index in range(num_streams)])
                speeds = {name: round(one[-1], 1) for name, one in bench.speeds.items()}
                print(f"{num_streams} streams, {number + 1} of {options.limit}: {speeds}", file=sys.stderr)
            if differing := bench.differing():
                print(f"{num_streams} streams: answers differ with {', '.join(differing)}")
                has_difference = True
                continue
            results[num_streams] = bench.report()
            print(f"{num_streams} streams\n\n{markdown(results[num_streams])}\n")
    about = {"hardware": describe_hardware(), "versions": describe_versions()}
    used = vars(options) | {name: getattr(options, name).name for name in ("target", "draft", "prompts")}
    for name in ("llama_server", "openvino_python"):
        del used[name]
    print(json.dumps({"bench": "rivals"} | about | {"options": used, "streams": results}))
    return 1 if has_difference else 0


def _started(options: argparse.Namespace, load: Load, stack: ExitStack) -> dict[str, Side]:
    """All sides by name, with their servers running until the end of `stack`."""
    ours = {name: OURS[name] for name in options.drafters}
    config = OurConfig(
        verify_threads=options.verify_threads or options.threads,
        draft_threads=options.draft_threads or options.threads,
        verify_options=options.verify_options,
        router_options=options.router_options,
    )
    sides = dict(stack.enter_context(our_sides(load, ours, config)))
    if options.llama_server is not None:
        for kind in options.llama_kinds:
            sides[f"llama.cpp {kind}"] = stack.enter_context(llama_side(load, options.llama_server, kind))
    if options.openvino_python is not None and load.num_streams == 1:
        for kind in OPENVINO_KINDS:
            sides[f"openvino {kind}"] = stack.enter_context(openvino_side(load, options.openvino_python, kind))
    return sides


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.rivals", description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="GGUF file of the target model")
    add("--draft", type=Path, required=True, help="GGUF file of the draft model")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--chat", action="store_true", help="prompts are messages to the model's chat template")
    add("--limit", type=positive, default=6, help="groups of prompts for each number of streams")
    add("--streams", nargs="+", type=positive, default=[1, 8], help="requests at once")
    add("--max-new-tokens", type=positive, default=128, help="tokens of an answer")
    add("--context", type=positive, default=2048, help="tokens of a request in llama.cpp, its answer among them")
    add(
        "--threads",
        type=positive,
        default=num_cores(),
        help="CPU threads of each engine; Betoken uses as many for each model",
    )
    add("--drafters", nargs="+", choices=tuple(OURS), default=list(OURS), help="our sides")
    add("--llama-server", type=Path, help="llama.cpp's server; without it, it is left out")
    add("--llama-kinds", nargs="+", choices=tuple(LLAMA_KINDS), default=list(LLAMA_KINDS), help="its sides")
    add("--openvino-python", type=Path, help="a Python with openvino-genai, for one stream")
    add("--verify-threads", type=positive, help="threads of our target model (default: --threads)")
    add("--draft-threads", type=positive, help="threads of our draft model (default: --threads)")
    add("--verify-options", nargs="*", default=[], help="further options of our verify worker, each as --name=value")
    add("--router-options", nargs="*", default=[], help="further options of our router, for example --overlap=on")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.rivals", lambda: measure(parse_options())))
