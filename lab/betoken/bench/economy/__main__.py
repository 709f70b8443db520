"""The effect of each rule of the economy of drafts: the simulator with the rule and without it.

    python -m betoken.bench.economy [--scenarios NAME ...] [--seeds 3]

Speeds are tokens/s over those without drafts, a mean over seeds of the machine's noise.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import mean, stdev

from betoken.bench.command import positive
from betoken.bench.economy.rules import RULES, switched_off
from betoken.bench.economy.scenarios import SCENARIOS, speed


def ratios(name: str, num_seeds: int) -> list[float]:
    """Speed with drafts by speed without, a number for each seed."""
    return [speed(name, seed) / speed(name, seed, drafter="none") for seed in range(num_seeds)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each scenario, then one for each rule: what is lost without it."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.economy", description=__doc__)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each")
    options = parser.parse_args(arguments)
    usual = {name: ratios(name, options.seeds) for name in options.scenarios}
    for name, values in usual.items():
        spread = stdev(values) if len(values) > 1 else 0.0
        print(f"{name:24} {mean(values):.3f} +- {spread / len(values) ** 0.5:.3f}")
    print("without".ljust(34), "  ".join(options.scenarios))
    for rule in RULES:
        with switched_off(rule):
            cells = [f"{mean(ratios(name, options.seeds)) / mean(usual[name]):.3f}" for name in options.scenarios]
        print(f"{rule:34} {'  '.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
