"""All services as processes of this machine, started in order and stopped together.

Knows which options connect them; what they do is theirs. Needs neither typer nor rich.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from betoken.cli.service_process import Progress, ServiceFailedError, ServiceProcess
from betoken.client import Client, ClientTls, RetryPolicy
from betoken.common.address import UNIX_PREFIX, is_socket

if TYPE_CHECKING:
    from betoken.drafters.registry import DrafterSpec

LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
_RETRY = RetryPolicy(max_outage_s=3.0)
"""A router that cannot say what it serves has waited for a verify worker in vain, and says why; once is enough."""
_SYNTHETIC = "is synthetic: its tokens and times are made up"
VERIFY_MODULE = "betoken.verify_worker"
DRAFT_MODULE = "betoken.draft_worker"
ROUTER_MODULE = "betoken.router"
GATEWAY_MODULE = "betoken.gateway"


@dataclass(frozen=True, slots=True)
class LocalServicesConfig:
    """Options of the services to start."""

    target: str
    """Target model: a directory or hub id. Its tokenizer is the router's."""
    draft: str = ""
    """Draft model: a directory or hub id; empty = without the drafters that need one."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Further models and weights of drafters, by option of the workers."""
    drafters: Sequence[str] | None = None
    """Drafters of each draft worker, the default first; empty = no draft worker; None = the usual ones with a model."""
    attached_drafters: Sequence[str] = ()
    """Drafters that verify workers run between their forwards."""
    num_attaching: int | None = None
    """Verify workers that run them, the first ones; None = all."""
    dtype: str = "bfloat16"
    """Type of both models' weights, activations and KV."""
    verify_threads: int | None = None
    """CPU threads of a verify worker; None = its own choice."""
    draft_threads: int | None = 1
    """CPU threads of a draft worker, whose model is small; None = its own choice."""
    compile: str = "auto"
    """"auto", "on" or "off", for both models."""
    prefix_caching: bool = True
    """Whether workers keep the KV of texts for others that begin alike."""
    num_verify_workers: int = 1
    num_draft_workers: int = 1
    host: str = LOOPBACK
    """Address the router listens on; workers are reachable from this machine only."""
    port: int = 0
    """TCP port of the router; 0 = any free one. Workers listen on Unix sockets."""
    http_port: int | None = None
    """TCP port of the gateway; 0 = any free one, None = none. It listens at the router's host, else on loopback."""
    verify_options: Sequence[str] = ()
    """Further command-line options of the verify workers."""
    draft_options: Sequence[str] = ()
    """Further command-line options of the draft workers."""
    router_options: Sequence[str] = ()
    """Further command-line options of the router."""
    gateway_options: Sequence[str] = ()
    """Further command-line options of the gateway."""
    log_directory: Path | None = None
    """Where `<name>.log` files go; None = a temporary directory that is removed in the end."""
    router_tls: ClientTls | None = None
    """How to reach a router that `router_options` make speak TLS."""
    start_timeout_s: float = 600.0
    """Maximum time without progress during start-up. A download reports each percent."""
    stop_grace_s: float = 15.0
    """How long the router, and then the workers, may take to end before they are killed: more than the services' own
    `--drain-grace-s`, in which running requests may finish."""


def embedded_models() -> Path | None:
    """The folder of the embedded pair (`target`, `draft`): the working directory's `models`, or this checkout's."""
    for folder in (Path.cwd() / "models", Path(__file__).parents[3] / "models"):
        if (folder / "target" / "config.json").is_file():
            return folder
    return None


class LocalServices:
    """The services "verify", "draft", "router" and "gateway" ("verify-1", "verify-2" ... if there are several).

    A context manager: `with LocalServices(config) as services: Client(services.address)`.
    """

    def __init__(
        self, config: LocalServicesConfig, on_progress: Callable[[str, Progress], None] = lambda name, progress: None
    ) -> None:
        """`on_progress` receives the name of a service and its start-up progress, whenever it changes."""
        self.config = config
        self.services: dict[str, ServiceProcess] = {}
        """By name, in the order of their start."""
        self.remarks: list[str] = []
        """Faults that the router found with serving workers, and which workers are synthetic."""
        self._on_progress = on_progress
        self._reported: dict[str, Progress] = {}
        """Last reported progress by name of the service."""
        self._directory = config.log_directory or Path()
        self._temporary: Path | None = None

    @property
    def address(self) -> str:
        """The router's `host:port`."""
        return self.services["router"].address

    def start(self) -> None:
        """Starts all together; returns when they serve and are connected. Router and gateway respond that the model is
        loading until the workers serve.

        Raises:
            ServiceFailedError: one did not come to serve; the others are stopped.
            BetokenError: the router cannot say what it serves; all are stopped.
        """
        try:
            if self.config.log_directory is None:  # the name is known before the folder is there: an interrupt finds it
                self._temporary = Path(_temporary_parent(), f"betoken-{secrets.token_hex(8)}")
                self._temporary.mkdir(mode=0o700)
                self._directory = self._temporary
            self._directory.mkdir(parents=True, exist_ok=True)
            verifiers = self._start("verify", VERIFY_MODULE, self._verify_arguments, self.config.num_verify_workers)
            num_draft_workers = (
                self.config.num_draft_workers if self.config.drafters is None or self.config.drafters else 0
            )
            drafters = self._start("draft", DRAFT_MODULE, lambda _: self._draft_arguments(), num_draft_workers)
            services = [*verifiers, *drafters]
            self._wait_until_addressed(services, services)
            routers = self._start("router", ROUTER_MODULE, lambda _: self._router_arguments(verifiers, drafters), 1)
            services += routers
            if self.config.http_port is not None:
                self._wait_until_addressed(routers, services)
                services += self._start("gateway", GATEWAY_MODULE, lambda _: self._gateway_arguments(), 1)
            self._wait_until_ready(services)
            self._wait_until_connected()
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """Stops the gateway, the router, then the workers, and kills the remaining ones after `grace_s`; may be
        called again."""
        fronts = [[self.services[name]] for name in ("gateway", "router") if name in self.services]
        workers = [service for name, service in self.services.items() if name not in ("gateway", "router")]
        for services in (*fronts, workers):
            deadline = time.monotonic() + (self.config.stop_grace_s if grace_s is None else grace_s)
            for service in services:
                service.terminate()
            for service in services:
                service.wait(max(0.0, deadline - time.monotonic()))
                service.kill()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def check(self) -> None:
        """Raises:
        ServiceFailedError: a service has ended.
        """
        for service in self.services.values():
            service.check()

    def kill(self, name: str) -> None:
        """Ends one service at once, as a crash would."""
        self.services[name].kill()

    def restart(self, name: str) -> None:
        """Starts an ended service again, on its old port; returns when it serves.

        Raises:
            ServiceFailedError: it did not come to serve.
        """
        service = self.services[name]
        service.start()
        self._reported.pop(name, None)
        self._wait_until_ready([service])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(
        self, role: str, module: str, arguments: Callable[[int], Sequence[str]], count: int
    ) -> list[ServiceProcess]:
        """`arguments`: of the service of that number, from 0."""
        names = [role] if count == 1 else [f"{role}-{index}" for index in range(1, count + 1)]
        started = []
        for number, name in enumerate(names):
            host, port = self._place(role, name)
            service = ServiceProcess(name, module, arguments(number), directory=self._directory, host=host, port=port)
            self.services[name] = service
            service.start()
            started.append(service)
        return started

    def _place(self, role: str, name: str) -> tuple[str, int]:
        """Host and port to listen on."""
        config = self.config
        match role:
            case "router":
                return config.host, config.port
            case "gateway":
                host = LOOPBACK if config.host.startswith(UNIX_PREFIX) else config.host
                return host, config.http_port or 0
        return self._worker_host(name), 0

    def _worker_host(self, name: str) -> str:
        """A Unix socket, which costs less than a port, where its path can be one's."""
        address = f"{UNIX_PREFIX}{self._directory.resolve() / name}.sock"
        return address if is_socket(address) else LOOPBACK

    def _wait_until_addressed(self, services: Sequence[ServiceProcess], started: Sequence[ServiceProcess]) -> None:
        """Wait for services whose port is known once they serve; a socket's address is known at once."""
        self._wait_until_ready(started, [each for each in services if not each.port and not is_socket(each.host)])

    def _wait_until_ready(
        self, services: Sequence[ServiceProcess], until: Sequence[ServiceProcess] | None = None
    ) -> None:
        """Report the progress of `services` and return when all, or those in `until`, serve."""
        wanted = services if until is None else until
        waiting = list(services)
        deadline = time.monotonic() + self.config.start_timeout_s
        while any(service in waiting for service in wanted):
            for service in services:  # not services that ended before and are restarted later
                service.check()
            for service in list(waiting):
                if service.is_ready():
                    waiting.remove(service)
                    is_front = service.name in ("router", "gateway")
                    progress = Progress(f"serving at {service.address}" if is_front else "serving", 1.0)
                else:
                    progress = service.progress() or Progress("starting", 0.0)
                if self._reported.get(service.name) != progress:
                    self._reported[service.name] = progress
                    self._on_progress(service.name, progress)
                    deadline = time.monotonic() + self.config.start_timeout_s
            if waiting and time.monotonic() > deadline:
                late = next((service for service in wanted if service in waiting), waiting[0])
                what = f"does not come to serve: no progress for {self.config.start_timeout_s:g} s"
                raise ServiceFailedError(late.name, f"{what} ({self._reported[late.name].stage})", late.log_tail())
            time.sleep(_POLL_S)

    def _wait_until_connected(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        with Client(self.address, tls=self.config.router_tls, retry=_RETRY) as client:
            while True:
                self.check()
                info = client.model_info()
                workers = (*info.verify_workers, *info.draft_workers)
                missing = [worker for worker in workers if worker.state != "ready"]
                if not missing:
                    names = {service.address: name for name, service in self.services.items()}
                    self.remarks = [f"{names[w.address]} {w.detail}" for w in workers if w.detail]
                    self.remarks += [f"{names[w.address]} {_SYNTHETIC}" for w in workers if w.is_synthetic]
                    return
                first = missing[0]
                if first.state == "refused" or time.monotonic() > deadline:
                    what = f"has no connection to the worker at {first.address} ({first.state}: {first.detail})"
                    raise ServiceFailedError("router", what, self.services["router"].log_tail())
                time.sleep(_POLL_S)

    def _verify_arguments(self, number: int) -> list[str]:
        config = self.config
        from betoken.drafters.registry import NO_DRAFTERS  # of the services, which are installed by now

        options: dict[str, object] = {"model": config.target, "dtype": config.dtype, "compile": config.compile}
        is_attaching = config.num_attaching is None or number < config.num_attaching
        names = ",".join(config.attached_drafters if is_attaching else ())
        options |= {"threads": config.verify_threads} | self._weights(lambda spec: spec.can_attach)
        own = [*_options(options), "--attached-drafters", names or NO_DRAFTERS]
        return [*own, *self._caching(), *config.verify_options]

    def _draft_arguments(self) -> list[str]:
        config = self.config
        from betoken.drafters.registry import target_options  # of the services, which are installed by now

        options: dict[str, object] = {"drafters": ",".join(config.drafters or ()), "model": config.draft}
        options |= {"dtype": config.dtype, "compile": config.compile, "threads": config.draft_threads}
        options |= {option.name: config.target for option in target_options()}
        options |= self._weights(lambda spec: spec.can_host)
        return [*_options(options), *self._caching(), *config.draft_options]

    def _weights(self, runs: Callable[[DrafterSpec], bool]) -> dict[str, object]:
        """Weights for a worker that may run these drafters, by option."""
        from betoken.drafters.registry import weight_options

        return {option.name: self.config.weights.get(option.name) for option in weight_options(runs)}

    def _caching(self) -> list[str]:
        return [] if self.config.prefix_caching else ["--no-prefix-caching"]

    def _router_arguments(self, verifiers: Sequence[ServiceProcess], drafters: Sequence[ServiceProcess]) -> list[str]:
        options = {
            "verify": ",".join(service.address for service in verifiers),
            "tokenizer": self.config.target,
        }
        # Without drafters BETOKEN_DRAFT, if set, would name others. BETOKEN_MODEL is meant for workers: a folder,
        # because the router compares the id that they announce.
        draft = ",".join(service.address for service in drafters)
        return [*_options(options), "--draft", draft, "--model", "", *self.config.router_options]

    def _gateway_arguments(self) -> list[str]:
        options: dict[str, object] = {"router": self.address}
        tls = self.config.router_tls
        if tls is not None:
            files = {"ca": tls.ca_file, "cert": tls.cert_file, "key": tls.key_file}
            options |= {f"router-tls-{name}-file": file for name, file in files.items()}
            options["router-tls-server-name"] = tls.server_name
        return [*_options(options), *([] if tls is None else ["--router-tls"]), *self.config.gateway_options]


def _temporary_parent() -> str:
    """Folder of temporary folders; `tempfile` tries the places by a file each, which an interrupt leaves there."""
    places = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    may_write = (place for place in (*places, "/tmp", "/var/tmp") if place and os.access(place, os.W_OK | os.X_OK))
    return next(may_write, os.curdir)


def _options(values: Mapping[str, object]) -> list[str]:
    """Command-line options; None and empty values are omitted."""
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items() if value not in (None, "")}
    return [part for option in given.items() for part in option]
