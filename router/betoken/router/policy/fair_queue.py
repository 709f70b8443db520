"""The queue of waiting requests, fair between tenants: whose turn is next, and who gives way when it is full.

Within a tenant first come, first served. Knows accounts, not slots, workers or time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from betoken.router.policy.account import Account


@dataclass(eq=False, slots=True)
class Place:
    """One request's place, in the queue or among the running requests."""

    tenant: str
    accounts: Sequence[Account]
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when it is admitted; fails when it must give way."""
    is_admitted: bool = False

    @property
    def can_run(self) -> bool:
        """Whether its own accounts let it run now."""
        return all(account.can_run for account in self.accounts)


class FairQueue:
    """Waiting places by tenant, and how many of each tenant run."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Place, None]] = {}  # ordered, and left from the middle at once
        self._num_running: Counter[str] = Counter()
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, place: Place) -> None:
        """Queue it behind the other requests of its tenant."""
        self._waiting.setdefault(place.tenant, {})[place] = None
        self._length += 1
        for account in place.accounts:
            account.num_waiting += 1

    def remove(self, place: Place) -> None:
        """Take it out of the queue, if it is there."""
        places = self._waiting.get(place.tenant, {})
        if place not in places:
            return
        del places[place]
        self._length -= 1
        for account in place.accounts:
            account.num_waiting -= 1
        if not places:
            del self._waiting[place.tenant]
            self._forget_idle(place.tenant)

    def start(self, place: Place) -> None:
        """It runs from now on."""
        self.remove(place)
        place.is_admitted = True
        self._num_turns += 1
        self._last_turn[place.tenant] = self._num_turns
        self._num_running[place.tenant] += 1
        for account in place.accounts:
            account.num_running += 1

    def end(self, place: Place) -> None:
        """It runs no more."""
        self._num_running[place.tenant] -= 1
        for account in place.accounts:
            account.num_running -= 1
        self._forget_idle(place.tenant)

    def next(self) -> Place | None:
        """The next tenant: among those with a request that may run, the one with the fewest running. Equals go by the
        turn that is longest ago."""
        best, best_rank = None, (0, 0)
        for tenant, places in self._waiting.items():
            rank = (self._num_running[tenant], self._last_turn.get(tenant, 0))
            if best is not None and rank >= best_rank:
                continue
            place = next((place for place in places if place.can_run), None)
            if place is not None:
                best, best_rank = place, rank
        return best

    def gives_way_to(self, newcomer: Place) -> Place | None:
        """Who leaves a full queue for `newcomer`: the last of the tenant that has most waiting, if it has more than the
        newcomer's would; else None."""
        longest = max(self._waiting.values(), key=len, default={})
        own = len(self._waiting.get(newcomer.tenant, ()))
        return next(reversed(longest), None) if len(longest) > own + 1 else None

    def _forget_idle(self, tenant: str) -> None:
        if not self._num_running[tenant]:
            del self._num_running[tenant]
            if tenant not in self._waiting:
                self._last_turn.pop(tenant, None)
