"""Server bootstrap: bind, health, reflection, TLS, ready file; then signal -> drain -> stop.

Knows settings and gRPC; knows no service beyond its name. Prints nothing.
"""

import asyncio
import gc
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from betoken.common.errors import BetokenError, InternalError
from betoken.common.logs import configure_logging
from betoken.rpc import telemetry
from betoken.rpc.calls import CallLimits, remember_owners
from betoken.rpc.decoding import TypedDecoding
from betoken.rpc.early_end import undone_at_end
from betoken.rpc.exposure import warning_of
from betoken.rpc.health import HealthServicer
from betoken.rpc.listening import bind, check_free, credentials_of
from betoken.rpc.memory import keep_trimming
from betoken.rpc.settings import ServiceSettings
from betoken.rpc.stopping import Stopping

_log = logging.getLogger(__name__)

MIN_PING_INTERVAL_S = 5.0
"""Clients that ping an idle connection more often are disconnected."""
_KEEPALIVE_TIME_S = 20.0
_KEEPALIVE_TIMEOUT_S = 10.0
PING_OPTIONS = (
    ("grpc.keepalive_time_ms", int(_KEEPALIVE_TIME_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.http2.ping_timeout_ms", int(_KEEPALIVE_TIMEOUT_S * 1000)),  # what counts; a minute by default
    ("grpc.keepalive_permit_without_calls", 1),
    # Five minutes by default: gRPC then ends an idle link at its third ping.
    ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_PING_INTERVAL_S * 1000)),
)
"""Options of a server that links and clients keep open while they are idle."""
_PENDING_SHARE = 1.125
"""Queue limit as a multiple of `max_calls`. Calls within it are rejected with a retry delay; gRPC cancels calls
beyond it. A queued call takes 25 KB, even after a reset."""
_MAX_UNLOOKED_S = 3600
"""How long a call may wait for the event loop to look at it, seconds."""
_HEALTH_PERIOD_S = 0.5
_STOP_GRACE_S = 0.5  # after a drain only health watchers and statuses under way are left


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a server."""

    name: str
    """Fully qualified, e.g. `betoken.v1.VerifyService`."""
    servicer: Any
    register: Callable[[Any, Any], None]
    """The generated `add_…Servicer_to_server`."""
    is_available: Callable[[], bool] = lambda: True
    """Whether requests are answered now, rather than held: what the service's own health says."""


async def serve(
    services: Sequence[Service],
    settings: ServiceSettings,
    *,
    on_drain: Callable[[float], Awaitable[None]] | None = None,
    sends_away: bool = False,
    on_ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    failure: asyncio.Future[BaseException] | None = None,
    max_connection_age_s: float = 0.0,
    interceptors: Sequence[Any] = (),
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then drain and stop. A second signal stops at once.

    Args:
        on_drain: gets the seconds running work may take; refuses new work, returns when none is left. It is cancelled
            when they are over. None: the server itself refuses new calls and waits for open ones.
        sends_away: the server rejects new calls during `on_drain`, so that clients use other addresses at once;
            otherwise it listens to the end, for peers that know this one only.
        on_ready: gets the bound port (0: a Unix socket) once the service takes requests.
        stop: ends serving when set; given by callers that handle signals themselves.
        failure: done when a resource of the services is lost: serving ends without a grace period.
        max_connection_age_s: after about so long a client makes its next calls over a new connection; 0 = never.
        interceptors: see each call before all others.

    Raises:
        FailedPreconditionError: the address cannot be bound, or a TLS file cannot be read.
        InvalidArgumentError: a TLS file is not PEM, or the key is another certificate's.
        InternalError: `failure` came.
    """
    async with listening(services, settings, interceptors, max_connection_age_s) as listener:
        await listener.serve(on_drain=on_drain, sends_away=sends_away, on_ready=on_ready, stop=stop, failure=failure)


@asynccontextmanager
async def listening(
    services: Sequence[Service],
    settings: ServiceSettings,
    interceptors: Sequence[Any] = (),
    max_connection_age_s: float = 0.0,
) -> AsyncIterator["Listener"]:
    """Listen during the block, NOT_SERVING until `Listener.serve`; arguments and errors as of `serve`."""
    server, health_servicer = _server(services, settings, interceptors, max_connection_age_s)
    port = bind(server, settings)
    await server.start()
    try:
        yield Listener(server, health_servicer, port, services, settings)
    finally:
        await server.stop(_STOP_GRACE_S)
        _log.info("stopped")


class Listener:
    """A server that listens."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: HealthServicer,
        port: int,
        services: Sequence[Service],
        settings: ServiceSettings,
    ) -> None:
        self._server, self._health, self._port = server, health_servicer, port
        self._services, self._settings = services, settings

    async def serve(
        self,
        *,
        on_drain: Callable[[float], Awaitable[None]] | None = None,
        sends_away: bool = False,
        on_ready: Callable[[int], None] | None = None,
        stop: asyncio.Event | None = None,
        failure: asyncio.Future[BaseException] | None = None,
    ) -> None:
        """Report that the services take requests, until SIGTERM, SIGINT or `stop`; then drain. See `serve`."""
        settings, names = self._settings, ", ".join(service.name for service in self._services)
        stopping = Stopping(stop)
        if failure is not None:
            failure.add_done_callback(lambda _: stopping.ask())
        try:
            _set_health(self._health, self._services)
            _write_ready_file(settings.ready_file, self._port)
            _log.info("serving %s on %s, port %d", names, settings.host, self._port)
            if on_ready is not None:
                on_ready(self._port)
            async with asyncio.TaskGroup() as tasks:
                telling = tasks.create_task(_keep_telling_health(self._health, self._services))
                trimming = tasks.create_task(keep_trimming())
                await stopping.requested.wait()
                telling.cancel()
                trimming.cancel()
            grace_s = 0.0 if failure is not None and failure.done() else settings.drain_grace_s
            _log.info("draining for at most %g s", grace_s)
            self._health.stop()
            await stopping.unless_hurried(_drain(self._server, grace_s, on_drain, sends_away))
        finally:
            stopping.restore()
            _remove_ready_file(settings.ready_file, self._port)
        if failure is not None and failure.done():
            error = failure.result()
            raise InternalError(f"{type(error).__name__}: {error}") from error


def _server(
    services: Sequence[Service], settings: ServiceSettings, interceptors: Sequence[Any], max_connection_age_s: float
) -> tuple[grpc.aio.Server, HealthServicer]:
    """A server of the services, of health and of reflection, not started."""
    limits = CallLimits(settings.max_concurrent_rpcs, settings.max_unread_s)
    server = grpc.aio.server(
        interceptors=[limits, *interceptors, TypedDecoding()], options=_server_options(settings, max_connection_age_s)
    )
    remember_owners(asyncio.get_running_loop())
    for service in services:
        service.register(service.servicer, server)
    names = [service.name for service in services]
    health_servicer = _add_health(server, names, settings.max_unread_s)
    if settings.reflection:
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server, health_servicer


def run_service(name: str, settings: ServiceSettings, body: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Set up logging and telemetry, run `body` to its end; the process's exit status.

    A typed error that reaches this point is a refusal to start: one line in the log, status 1.
    """
    configure_logging(settings.log_level, settings.log_format, captures_stderr=True)
    try:
        shutdown_telemetry = telemetry.configure(name, *settings.telemetry)
    except Exception as error:  # the SDK has its own settings, OTEL_*, and reports invalid ones in many ways
        _log.error("%s cannot go on: telemetry: %s", name, error)
        return 1
    try:
        check_free(settings)  # before a model is loaded, which may take minutes
        credentials_of(settings)
        if warning := warning_of(settings):
            _log.warning("%s", warning)
        with undone_at_end(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(body())
    except BetokenError as error:
        _log.error("%s cannot go on: %s", name, error)
        return 1
    except KeyboardInterrupt:  # while it starts; once it serves, the signal drains
        shutdown_telemetry()
        os._exit(130)  # a thread that still loads a model would be torn down within foreign code, which aborts
    finally:
        shutdown_telemetry()
    return 0


@contextmanager
def importing() -> Iterator[None]:
    """Imports within it are not searched for garbage, then or later: a quarter of the time that torch and transformers
    take to import goes there.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_loaded() -> None:
    """Take all objects that there are out of garbage collection: what is loaded lives as long as the process.

    A full collection looks at each of them and holds up every stream meanwhile: a third of a second with torch loaded.
    """
    gc.collect()
    gc.freeze()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loops: a hop between services costs a tenth less. asyncio's own if it is not available.

    Services start processes (compilers) by `subprocess` only, which runs no Python in the child. asyncio under uvloop
    does: fork hooks such as the OpenTelemetry SDK's, and with them the garbage collector, which may free objects of
    threads that the child lacks.
    """
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


async def _drain(
    server: grpc.aio.Server,
    grace_s: float,
    on_drain: Callable[[float], Awaitable[None]] | None,
    sends_away: bool,
) -> None:
    if on_drain is None:
        await server.stop(grace_s)
        return
    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(server.stop(grace_s + _STOP_GRACE_S)) if sends_away else None
        try:
            async with asyncio.timeout(grace_s + _STOP_GRACE_S):
                await on_drain(grace_s)
        except TimeoutError:
            _log.warning("work is left after %g s and is cut off", grace_s)
        if stopping is not None:
            stopping.cancel()  # it would wait for those who watch its health


def _server_options(settings: ServiceSettings, max_connection_age_s: float) -> list[tuple[str, Any]]:
    max_pending = math.ceil(_PENDING_SHARE * settings.max_concurrent_rpcs)
    options = [
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        *PING_OPTIONS,
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.max_connection_streams),
        ("grpc.server.max_pending_requests", max_pending),
        ("grpc.server.max_pending_requests_hard_limit", max_pending),
        # After 30 s by default it cancels, without a word, what the event loop has not looked at yet.
        ("grpc.server_max_unrequested_time_in_server", _MAX_UNLOOKED_S),
    ]
    if max_connection_age_s:  # calls under way go on: gRPC's own grace has no end
        options.append(("grpc.max_connection_age_ms", math.ceil(max_connection_age_s * 1000)))
    return options


def _add_health(server: grpc.aio.Server, names: Sequence[str], max_unread_s: float) -> HealthServicer:
    servicer = HealthServicer(max_unread_s)
    for name in ("", *names):
        servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def _set_health(servicer: HealthServicer, services: Sequence[Service]) -> None:
    """The process (empty name) serves as long as it takes requests."""
    for name, is_available in (("", True), *((service.name, service.is_available()) for service in services)):
        status = health_pb2.HealthCheckResponse
        servicer.set(name, status.SERVING if is_available else status.NOT_SERVING)


async def _keep_telling_health(servicer: HealthServicer, services: Sequence[Service]) -> None:
    while True:
        await asyncio.sleep(_HEALTH_PERIOD_S)
        _set_health(servicer, services)


def _write_ready_file(path: Path | None, port: int) -> None:
    if path is None:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(_ready_text(port))
    partial.replace(path)


def _remove_ready_file(path: Path | None, port: int) -> None:
    """A service started in place of this one may have written its own by now; that stays."""
    with suppress(FileNotFoundError):
        if path is not None and path.read_text() == _ready_text(port):
            path.unlink()


def _ready_text(port: int) -> str:
    return json.dumps({"port": port, "pid": os.getpid()}) + "\n"
