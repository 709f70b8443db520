"""The command in this process and as a process, and an answer for it."""

import os
import random
import socket
import subprocess
import sys
from contextlib import suppress

from typer.testing import CliRunner

from betoken.cli.main import app
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2
from tests.pipes import line_of


def start(arguments: list[str], **options) -> subprocess.Popen[str]:
    """The command as a process, with `fake_service` for the real services."""
    # A background shell has SIGINT ignored, nohup SIGHUP.
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += "from betoken.cli import local_services as l, main\n"
    code += "l.VERIFY_MODULE = l.DRAFT_MODULE = l.ROUTER_MODULE = l.GATEWAY_MODULE = 'fake_service'\nmain.app()"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, **options)


ACCEPTED = {"origin": types_pb2.TOKEN_ORIGIN_ACCEPTED, "source": "model"}


STATS = pb.SpeculationStats(
    num_drafts=1,
    num_draft_tokens=4,
    num_accepted_tokens=2,
    num_accepted_per_position=[1, 1, 0, 0],
    num_drafted_per_position=[1, 1, 1, 1],
    num_verify_forwards=1,
    num_emitted_tokens=3,
    num_rounds=2,
    num_draft_forwards=5,
)


cli = CliRunner()


def run(*arguments: str, **options):
    return cli.invoke(app, list(arguments), **options)


def unused_port() -> int:
    """Free port outside the ephemeral range, so that no other process is assigned it meanwhile."""
    for port in random.Random(os.getpid()).sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are in use")


def lines_until(stream, reported: str) -> list[str]:
    lines = [line_of(stream)]
    while reported not in lines[-1]:
        lines.append(line_of(stream))
        assert lines[-1], lines
    return lines
