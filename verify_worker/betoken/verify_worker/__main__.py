"""`python -m betoken.verify_worker`: a verify worker process."""

import logging
import os
import sys
from collections.abc import Coroutine
from typing import Any

from betoken.common.errors import InvalidArgumentError
from betoken.common.logs import configure_logging
from betoken.rpc.server import importing, run_service
from betoken.verify_worker.launched import launched_rank
from betoken.verify_worker.settings import VerifyWorkerSettings


def _run(settings: VerifyWorkerSettings) -> Coroutine[Any, Any, None]:
    # Here: torch and transformers take seconds, for which `--help`, a wrong option or a port in use need not wait. Nor
    # need an interrupt, which would only cancel a coroutine: this is called before the event loop runs.
    with importing():
        from betoken.verify_worker.service import run
    return run(settings)


def _follow(settings: VerifyWorkerSettings) -> int:
    """Follow rank 0 as a rank that a launcher has started; the process's exit status."""
    try:
        launched = launched_rank(settings)
    except InvalidArgumentError as error:
        configure_logging(settings.log_level, settings.log_format)
        logging.getLogger(__name__).error("verify-worker cannot go on: %s", error)
        return 1
    if launched is None:
        return run_service("verify-worker", settings, lambda: _run(settings))
    from betoken.verify_worker.ranks import follow_launched

    follow_launched(settings, launched)
    return 1


def main() -> int:
    """Parse options and serve; the process's exit status."""
    settings = VerifyWorkerSettings.parse(program="betoken verify-worker")
    if os.environ.get("RANK", "0") != "0":
        return _follow(settings)
    return run_service("verify-worker", settings, lambda: _run(settings))


if __name__ == "__main__":
    sys.exit(main())
