"""A machine without a clock: jobs share its cores, messages take their time, and events happen in order.

Knows nothing of drafts.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

Then = Callable[[], None]

_SPREAD = 0.15
"""Standard deviation of log(time of a job)."""
_SLOW_EVERY_S, _SLOW_FOR_S, _SLOW_FACTOR = 2.0, (0.05, 0.4), 1.6
"""Mean time between slow moments, their length in seconds, and what they multiply times by: as on a shared machine."""


@dataclass(slots=True)
class _Job:
    left_s: float
    """Seconds of work that are left, with a core for each thread."""
    threads: int
    then: Then


class Machine:
    """Simulated time, `now_s`; `run` goes from event to event."""

    def __init__(self, cores: int, noise: random.Random | None = None) -> None:
        """`noise`: makes jobs longer and shorter by chance, and slows all of them for a while now and then."""
        self.now_s = 0.0
        self._noise = noise
        self._slow_until_s = 0.0
        self._slow_next_s = noise.expovariate(1 / _SLOW_EVERY_S) if noise is not None else math.inf
        self._cores = cores
        self._jobs: list[_Job] = []
        self._events: list[tuple[float, int, Then]] = []
        self._order = itertools.count()

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds, never 0."""
        return 1 + round(self.now_s * 1e9)

    def work(self, seconds: float, threads: int, then: Then) -> None:
        """`then` happens after so much work; jobs with more threads than there are cores slow each other."""
        if self._noise is not None:
            seconds *= self._noise.lognormvariate(0.0, _SPREAD) * (_SLOW_FACTOR if self._is_slow(self._noise) else 1.0)
        self._jobs.append(_Job(max(seconds, 1e-9), threads, then))

    def _is_slow(self, noise: random.Random) -> bool:
        if self.now_s >= self._slow_next_s:
            self._slow_until_s = self.now_s + noise.uniform(*_SLOW_FOR_S)
            self._slow_next_s = self._slow_until_s + noise.expovariate(1 / _SLOW_EVERY_S)
        return self.now_s < self._slow_until_s

    def after(self, seconds: float, then: Then) -> None:
        """`then` happens after that time, whatever works meanwhile."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), then))

    def run(self, until_s: float) -> None:
        """Go on until that time, or until nothing is left to happen."""
        while (self._jobs or self._events) and self.now_s < until_s:
            pace = min(1.0, self._cores / max(1, sum(job.threads for job in self._jobs)))
            first = min(self._jobs, key=lambda job: job.left_s, default=None)
            job_s = self.now_s + first.left_s / pace if first is not None else float("inf")
            event_s = self._events[0][0] if self._events else float("inf")
            next_s = min(job_s, event_s)
            for job in self._jobs:
                job.left_s -= (next_s - self.now_s) * pace
            self.now_s = next_s
            if first is not None and job_s <= event_s:
                self._jobs.remove(first)
                first.then()
            else:
                heapq.heappop(self._events)[2]()
