"""`python -m foretoken.draft_worker`: a draft worker process."""

import sys

from foretoken.draft_worker.service import run
from foretoken.draft_worker.settings import DraftWorkerSettings
from foretoken.rpc.server import run_service


def main() -> int:
    """Parse options and serve; the process's exit status."""
    settings = DraftWorkerSettings.parse(program="foretoken draft-worker")
    return run_service("draft-worker", settings, lambda: run(settings))


if __name__ == "__main__":
    sys.exit(main())
