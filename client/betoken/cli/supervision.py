"""Watches running services and restarts ended ones, each with increasing backoff.

Knows processes and which of them the others cannot do without; nothing of what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from betoken.cli.service_process import ServiceFailedError, ServiceProcess

STEADY_S = 60.0
"""How long a service has to serve for its next end to count as the first, seconds."""
MAX_ENDS = 5
"""Ends in a row after which a service is left ended."""
_FIRST_PAUSE_S = 1.0


@dataclass(slots=True)
class _Watch:
    """The state of one service."""

    num_ends: int = 0
    """Ends in a row, each before it had served for `STEADY_S`."""
    start_at_s: float | None = None
    """Time of the next start, monotonic seconds; None while it runs, or for good."""
    serving_since_s: float | None = None
    """Monotonic seconds; None before it serves."""
    is_left: bool = False
    """Whether it is not started again."""


class Supervisor:
    """Keeps services running. Call `step` often; it never waits."""

    def __init__(
        self,
        services: Mapping[str, ServiceProcess],
        report: Callable[[str], None],
        complain: Callable[[ServiceFailedError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`services` serve already; `report` and `complain` receive messages."""
        self._services = services
        self._report, self._complain, self._clock = report, complain, clock
        self._watches = {name: _Watch(serving_since_s=clock()) for name in services}

    def step(self) -> bool:
        """Whether what is left can serve, now or once it has been started again."""
        for name, watch in self._watches.items():
            if not watch.is_left:
                self._look_at(self._services[name], watch)
        verifiers = [watch for name, watch in self._watches.items() if name.startswith("verify")]
        return not self._watches["router"].is_left and not all(watch.is_left for watch in verifiers)

    def _look_at(self, service: ServiceProcess, watch: _Watch) -> None:
        now_s = self._clock()
        try:
            if watch.start_at_s is None:
                is_serving = service.is_ready()
                if is_serving and watch.serving_since_s is None:
                    watch.serving_since_s = now_s
                    self._report(f"{service.name} serves again, pid {service.pid}")
            elif now_s >= watch.start_at_s:
                watch.start_at_s = None
                service.start()
        except ServiceFailedError as error:
            self._complain(error)
            self._after_end(service, watch, now_s)

    def _after_end(self, service: ServiceProcess, watch: _Watch, now_s: float) -> None:
        if watch.serving_since_s is not None and now_s - watch.serving_since_s >= STEADY_S:
            watch.num_ends = 0
        watch.num_ends += 1
        watch.serving_since_s = None
        if service.was_stopped:
            watch.is_left = True
            self._report(f"{service.name} was stopped: it is not started again")
        elif watch.num_ends >= MAX_ENDS:
            watch.is_left = True
            self._report(f"{service.name} has ended {watch.num_ends} times in a row: it is not started again")
        else:
            pause_s = _FIRST_PAUSE_S * 2 ** (watch.num_ends - 1)
            watch.start_at_s = now_s + pause_s
            self._report(f"{service.name} is started again in {pause_s:g} s")
