"""`python -m betoken.verify_worker`: a verify worker process."""

import sys
from collections.abc import Coroutine
from typing import Any

from betoken.rpc.server import importing, run_service
from betoken.verify_worker.settings import VerifyWorkerSettings


def _run(settings: VerifyWorkerSettings) -> Coroutine[Any, Any, None]:
    # Here: torch and transformers take seconds, for which `--help`, a wrong option or a port in use need not wait. Nor
    # need an interrupt, which would only cancel a coroutine: this is called before the event loop runs.
    with importing():
        from betoken.verify_worker.service import run
    return run(settings)


def main() -> int:
    """Parse options and serve; the process's exit status."""
    settings = VerifyWorkerSettings.parse(program="betoken verify-worker")
    return run_service("verify-worker", settings, lambda: _run(settings))


if __name__ == "__main__":
    sys.exit(main())
