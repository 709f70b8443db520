"""Logs what an operator should know about newly connected workers."""

from __future__ import annotations

import logging
from typing import Any

from betoken.router.request.generation import AUTO_DRAFTER
from betoken.router.workers.drafter_choice import NO_DRAFTER
from betoken.router.workers.fleet import Fleet
from betoken.rpc.link import WorkerLink

_log = logging.getLogger(__name__)


class FleetLog:
    """Warnings about the workers of one router."""

    def __init__(self, fleet: Fleet, default_drafter: str) -> None:
        """`default_drafter`: value of --drafter."""
        self._fleet = fleet
        self._default_drafter = default_drafter
        self._logged: set[tuple[str, str]] = set()
        """Addresses of workers, and the hints logged about them."""
        fleet.verify.subscribe(self._log_synthetic)
        fleet.draft.subscribe(self._log_synthetic)
        fleet.verify.subscribe(self._log_short_contexts)
        fleet.draft.subscribe(self._warn_without_default_drafter)
        fleet.draft.subscribe(self._log_short_contexts)

    def _log_synthetic(self) -> None:
        """Log each synthetic worker once, however often it reconnects."""
        verifiers, drafters = self._fleet.verify.workers, self._fleet.draft.workers
        links: list[WorkerLink[Any, Any]] = [each.link for each in verifiers] + [each.link for each in drafters]
        for link in links:
            if link.hello is not None and link.hello.is_synthetic:
                self._warn_once(link, "is synthetic: its tokens and times are made up")

    def _warn_once(self, link: WorkerLink[Any, Any], hint: str) -> None:
        if (link.address, hint) not in self._logged:
            self._logged.add((link.address, hint))
            _log.warning("%s worker %s %s", link.role, link.address, hint)

    def _log_short_contexts(self) -> None:
        """Log each worker once, however often it reconnects."""
        for worker in self._fleet.draft.workers:
            hint = self._fleet.short_context(worker.link.hello) if worker.link.hello else ""
            if hint:
                self._warn_once(worker.link, hint)

    def _warn_without_default_drafter(self) -> None:
        wanted, known = self._default_drafter, self._fleet.known_drafters
        if wanted not in (AUTO_DRAFTER, NO_DRAFTER, *known):
            _log.warning(
                "--drafter %s: no connected draft worker hosts it, they host %s; by default requests get no drafts",
                wanted,
                ", ".join(known) or "none",
            )
