"""Shared parts of the benchmarks' commands: values of options, and one line if nothing could be measured.

Knows no benchmark.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from betoken.bench.baseline import BaselineError
from betoken.cli.service_process import ServiceFailedError
from betoken.client import BetokenError
from betoken.engine.errors import ModelRefusedError
from betoken.rpc.validation.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE

EXIT_NOTHING_MEASURED = 2
EXIT_INTERRUPTED = 130


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def temperature(text: str) -> float:
    """A temperature that services take."""
    value = float(text)
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    return value


def exit_status(module: str, body: Callable[[], int], kept: Path | None = None) -> int:
    """The status of `body`. It is 2 after one line on stderr if a file, model or service is missing or an answer is
    refused. It is 130 after Ctrl-C, with a line that names the folder in which results are `kept`.
    """
    try:
        return body()
    except (OSError, ValueError, BetokenError, ModelRefusedError, ServiceFailedError, BaselineError) as error:
        print(f"python -m {module}: {error}", file=sys.stderr)
        return EXIT_NOTHING_MEASURED
    except KeyboardInterrupt:
        rest = f"; what was measured is kept in {kept}" if kept is not None else ""
        print(f"python -m {module}: interrupted{rest}", file=sys.stderr)
        return EXIT_INTERRUPTED
