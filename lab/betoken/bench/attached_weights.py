"""Weights of attached drafters: an option for each that has some, and the verify worker's options made of them.

Knows names and directories; reads no weights.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from betoken.bench.matrix import WITH_WEIGHTS
from betoken.cli.local_services import embedded_models


def add_weights(parser: argparse.ArgumentParser) -> None:
    """An option for the directory of each drafter that has weights."""
    for name, option in WITH_WEIGHTS.items():
        text = f"weights of {name} (default: models/{name} for models/target)"
        parser.add_argument(option.flag, dest=name, default="", metavar="DIR", help=text)


def take_weights(given: dict[str, Any]) -> dict[str, str]:
    """Directories of the named drafters; removes their options from `given`."""
    named = {name: given.pop(name) for name in WITH_WEIGHTS}
    return {name: directory for name, directory in named.items() if directory}


def embedded_weights(target: str, drafters: Iterable[str]) -> dict[str, str]:
    """Return the directories of these drafters' weights in the repository; empty unless the target is embedded."""
    models = embedded_models()
    if models is None or not target or Path(target).resolve() != (models / "target").resolve():
        return {}
    return {name: str(models / name) for name in drafters if name in WITH_WEIGHTS and (models / name).is_dir()}


def weight_flag(drafter: str) -> str:
    """Return the verify worker's option for this drafter's weights; empty if it has none."""
    return WITH_WEIGHTS[drafter].flag if drafter in WITH_WEIGHTS else ""


def check_weights(drafters: Iterable[str], weights: Mapping[str, str]) -> None:
    """Raises:
    ValueError: one of these drafters has no weights.
    """
    for name in drafters:
        if name in WITH_WEIGHTS and name not in weights:
            raise ValueError(f"{name}: needs weights for this target: {weight_flag(name)} DIR")


def weight_options(drafters: Iterable[str], weights: Mapping[str, str]) -> list[str]:
    """Return a worker's options for the weights of these drafters."""
    return [part for name in drafters if name in weights for part in (weight_flag(name), weights[name])]
