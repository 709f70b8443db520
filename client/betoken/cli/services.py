"""`betoken router | draft-worker | verify-worker | gateway | check-keys | quantize`: becomes that program.

Their options are defined by the services; `--help` is answered by the service itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

import typer

from betoken.cli.connection import EXIT_FAILED
from betoken.cli.local_services import DRAFT_MODULE, GATEWAY_MODULE, ROUTER_MODULE, VERIFY_MODULE
from betoken.cli.service_process import service_environment
from betoken.common.release import how_to_install

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that hands all its arguments on."""
ROUTER_NEEDS = (ROUTER_MODULE, "asyncio_pool", "pydantic_settings", "tokenizers")
"""Without these a router does not start: its code, which the SDK alone does not bring, and packages of its extra."""
WORKER_NEEDS = (VERIFY_MODULE, "pydantic_settings", "torch", "transformers")
"""Packages of workers that run a model."""
GATEWAY_NEEDS = (GATEWAY_MODULE, "fastapi", "httptools", "prometheus_client", "pydantic_settings", "uvicorn")
"""Packages of the gateway."""
CHECK_KEYS_MODULE = "betoken.router.access.check_keys"
CHECK_KEYS_NEEDS = (CHECK_KEYS_MODULE, "pydantic_settings")
"""Packages for checking a key file."""
TRAINING_MODULE = "betoken.training"
TRAINING_NEEDS = (TRAINING_MODULE, "matplotlib", "torch", "transformers")
"""Packages of the recipes, which exist only in a checkout."""
QUANTIZE_MODULE = "betoken.engine.weights.quantize"
QUANTIZE_NEEDS = (QUANTIZE_MODULE, "torch", "transformers")
"""Packages for rounding a checkpoint."""
DRAFT_NEEDS = (DRAFT_MODULE, "pydantic_settings")
"""Packages of any draft worker: n-grams need no model. A worker whose drafters run one requires the rest itself."""


def router(context: typer.Context) -> None:
    """Run the router: clients call it, it calls the workers."""
    become(ROUTER_MODULE, context.args, extra="router", needs=ROUTER_NEEDS)


def draft_worker(context: typer.Context) -> None:
    """Run a draft worker: it guesses tokens."""
    become(DRAFT_MODULE, context.args, extra="router", needs=DRAFT_NEEDS)


def verify_worker(context: typer.Context) -> None:
    """Run a verify worker: it decides tokens with the target model."""
    become(VERIFY_MODULE, context.args, extra="worker", needs=WORKER_NEEDS)


def gateway(context: typer.Context) -> None:
    """Run the gateway: OpenAI's HTTP in front of a router, and a page."""
    become(GATEWAY_MODULE, context.args, extra="gateway", needs=GATEWAY_NEEDS)


def check_keys(context: typer.Context) -> None:
    """Check a router's file of API keys before the router reads it: `betoken check-keys FILE`."""
    become(CHECK_KEYS_MODULE, context.args, extra="router", needs=CHECK_KEYS_NEEDS)


def train(context: typer.Context) -> None:
    """Train a drafter for a target; `betoken train --help` lists the recipes."""
    become(TRAINING_MODULE, context.args, extra="worker,train", needs=TRAINING_NEEDS)


def quantize(context: typer.Context) -> None:
    """Round a dense checkpoint to int8 or int4: `betoken quantize SRC DST --quantize int4`."""
    become(QUANTIZE_MODULE, context.args, extra="worker", needs=QUANTIZE_NEEDS)


def missing_packages(needs: Sequence[str]) -> list[str]:
    """Packages among `needs` that are not installed."""
    return [name for name in needs if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def check_installed(what: str, *, extra: str, needs: Sequence[str]) -> None:
    """Raises:
    typer.Exit: something that `what` needs is missing; standard error names it and what would bring it.
    """
    if missing := missing_packages(needs):
        sys.stderr.write(f"betoken: {what} needs {', '.join(missing)}: {how_to_install(extra)}\n")
        raise typer.Exit(EXIT_FAILED)


def become(module: str, arguments: Sequence[str], *, extra: str, needs: Sequence[str]) -> None:
    """Replaces this process by `python -m module arguments`, so that signals reach the service itself.

    Raises:
        typer.Exit: what it needs is not installed.
    """
    check_installed(module.rpartition(".")[2].replace("_", "-"), extra=extra, needs=needs)
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], service_environment())
