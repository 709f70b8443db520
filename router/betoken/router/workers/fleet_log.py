"""Logs what an operator should know about newly connected workers."""

from __future__ import annotations

import logging

from betoken.router.workers.drafter_choice import AUTO_DRAFTER, NO_DRAFTER
from betoken.router.workers.fleet import Fleet

_log = logging.getLogger(__name__)


class FleetLog:
    """Warnings about the workers of one router."""

    def __init__(self, fleet: Fleet, default_drafter: str) -> None:
        """`default_drafter`: value of --drafter."""
        self._fleet = fleet
        self._default_drafter = default_drafter
        self._logged: set[tuple[str, str]] = set()
        """Addresses of draft workers with a shorter context, and the hints logged about them."""
        fleet.verify.subscribe(self._log_short_contexts)
        fleet.draft.subscribe(self._warn_without_default_drafter)
        fleet.draft.subscribe(self._log_short_contexts)

    def _log_short_contexts(self) -> None:
        """Log each worker once, however often it reconnects."""
        for worker in self._fleet.draft.workers:
            hint = self._fleet.short_context(worker.link.hello) if worker.link.hello else ""
            if hint and (worker.link.address, hint) not in self._logged:
                self._logged.add((worker.link.address, hint))
                _log.warning("draft worker %s %s", worker.link.address, hint)

    def _warn_without_default_drafter(self) -> None:
        wanted, known = self._default_drafter, self._fleet.known_drafters
        if wanted not in (AUTO_DRAFTER, NO_DRAFTER, *known):
            _log.warning(
                "--drafter %s: no connected draft worker hosts it, they host %s; by default requests get no drafts",
                wanted,
                ", ".join(known) or "none",
            )
