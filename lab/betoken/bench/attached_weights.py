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
    for name in WITH_WEIGHTS:
        parser.add_argument(
            f"--{name}", default="", metavar="DIR", help=f"weights of {name} (default: models/{name} for models/target)"
        )


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


def check_weights(drafters: Iterable[str], weights: Mapping[str, str]) -> None:
    """Raises:
    ValueError: one of these drafters has no weights.
    """
    for name in drafters:
        if name in WITH_WEIGHTS and name not in weights:
            raise ValueError(f"{name}: needs weights for this target: --{name} DIR")


def weight_options(drafters: Iterable[str], weights: Mapping[str, str]) -> list[str]:
    """The verify worker's options for the weights of these drafters."""
    return [part for name in drafters if name in weights for part in (f"--{name}", weights[name])]
