"""Runs the application under uvicorn: the port, the ready file, signals.

Knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from betoken.common.errors import FailedPreconditionError
from betoken.gateway.edge import MAX_READS
from betoken.gateway.protocol import bounded_protocol
from betoken.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)
_OTHER_DESCRIPTORS = 64
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which exits with status 0, and reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: ASGIApp,
    settings: GatewaySettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; answers under way may then take `drain_grace_s`. A second signal ends at
    once. `on_ready` gets the port.

    Raises:
        FailedPreconditionError: the address cannot be listened on, or a TLS file is none.
    """
    _allow_descriptors(settings)
    listening = _listen(settings)
    port: int = listening.getsockname()[1]
    server = _Server(_config(app, settings))
    loop, stopping = asyncio.get_running_loop(), stop or asyncio.Event()
    if stop is None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, _ask, server, stopping)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listening]))
            await server.is_listening.wait()
            _write_ready_file(settings, port)
            if on_ready is not None:
                on_ready(port)
            await stopping.wait()
            server.should_exit = True
    finally:
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)
        if stop is None:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


def _ask(server: _Server, stopping: asyncio.Event) -> None:
    if stopping.is_set():
        server.force_exit = True
    stopping.set()


def _config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=bounded_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(settings.drain_grace_s),
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
    )
    try:
        config.load()
    except OSError as error:  # an SSLError is one
        raise FailedPreconditionError(f"a TLS file cannot be used: {error}") from error
    return config


def _allow_descriptors(settings: GatewaySettings) -> None:
    """Raise this process's limit of descriptors to what its bounds add up to, so that a probe is always accepted."""
    if sys.platform == "win32":
        return
    import resource

    needed = settings.max_requests + settings.max_incomplete_bodies + settings.max_idle_connections
    needed += MAX_READS + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        _log.warning(
            "--max-requests, --max-incomplete-bodies and --max-idle-connections need %d file descriptors, the limit is"
            " %d: lower them or raise it (ulimit -n)",
            needed,
            hard,
        )
        needed = hard
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _listen(settings: GatewaySettings) -> socket.socket:
    host = settings.host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.setblocking(False)
            return listening
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FailedPreconditionError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from error


def _write_ready_file(settings: GatewaySettings, port: int) -> None:
    if settings.ready_file is None:
        return
    partial = settings.ready_file.with_name(f".{settings.ready_file.name}.{os.getpid()}")
    partial.write_text(json.dumps({"port": port, "pid": os.getpid()}) + "\n")
    partial.replace(settings.ready_file)
