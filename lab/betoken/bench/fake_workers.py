"""`python -m betoken.bench.fake_workers`: a fake verify and a fake draft worker in a separate process.

Both answer at once (or after `--step-ms`), so that what is left of a round is the router and the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from betoken.bench.command import exit_status
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.server import loop_factory
from betoken.testing.fake_draft_worker import FakeDraftWorker, draft_hello
from betoken.testing.fake_model import FakeModel
from betoken.testing.fake_verify_worker import FakeVerifyWorker, verify_hello

READY_FILE = "ready"


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    tokenizer = Tokenizer.load(arguments.tokenizer)
    model = FakeModel(vocab_size=tokenizer.vocab_size)
    step_s = arguments.step_ms / 1000
    verifier = FakeVerifyWorker(
        model, verify_hello(model, tokenizer.hash, max_sequences=1024), step_s, f"unix:{arguments.folder}/verify.sock"
    )
    drafter = FakeDraftWorker(
        model,
        draft_hello(model, tokenizer.hash, max_sequences=1024),
        arguments.agreement,
        step_s,
        f"unix:{arguments.folder}/draft.sock",
    )
    await verifier.start()
    await drafter.start()
    (arguments.folder / READY_FILE).touch()
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    await stopped.wait()
    await verifier.kill()
    await drafter.kill()
    violations = verifier.violations + drafter.violations
    if violations:
        raise SystemExit(f"{len(violations)} violations of the protocol, the first: {violations[0]}")


def main() -> int:
    """Parse options and run; 2 if the tokenizer does not exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="directory or hub id, for vocabulary size and hash")
    parser.add_argument(
        "--folder", type=Path, required=True, help=f"for the sockets verify.sock and draft.sock, and then {READY_FILE}"
    )
    parser.add_argument("--agreement", type=float, default=0.8, help="probability that a drafted token is right")
    parser.add_argument("--step-ms", type=float, default=0.0, help="pretended duration of a forward")
    arguments = parser.parse_args()
    return exit_status("betoken.bench.fake_workers", lambda: _serve(arguments))


def _serve(arguments: argparse.Namespace) -> int:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # as real workers do
        runner.run(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
