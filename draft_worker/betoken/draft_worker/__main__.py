"""`python -m betoken.draft_worker`: a draft worker process."""

import sys
from collections.abc import Coroutine
from typing import Any

from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.rpc.server import importing, run_service


def _run(settings: DraftWorkerSettings) -> Coroutine[Any, Any, None]:
    # Here: torch and transformers take seconds, for which `--help`, a wrong option or a port in use need not wait. Nor
    # need an interrupt, which would only cancel a coroutine: this is called before the event loop runs.
    with importing():
        from betoken.draft_worker.service import run
    return run(settings)


def main() -> int:
    """Parse options and serve; the process's exit status."""
    settings = DraftWorkerSettings.parse(program="betoken draft-worker")
    return run_service("draft-worker", settings, lambda: _run(settings))


if __name__ == "__main__":
    sys.exit(main())
