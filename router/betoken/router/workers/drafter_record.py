"""Evidence about one drafter at one draft worker, from the rounds of all requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from betoken.common.economy.collapse import AcceptanceAlarm
from betoken.common.economy.overlap import OverlapPolicy

_log = logging.getLogger(__name__)


class DraftedRound(NamedTuple):
    """A round until its verification ends."""

    num_tokens: int
    """Most draft tokens that can be accepted."""
    draft_s: float
    """Wait for the draft, seconds."""
    is_hit: bool | None
    """Whether the draft was made ahead; None = nothing was to be."""
    is_overlapped: bool
    """Whether the drafter drafts ahead during the verification."""
    began_s: float
    """Start of the verification, `time.perf_counter`."""


@dataclass(slots=True)
class DrafterRecord:
    """State of one drafter at one draft worker."""

    name: str
    """Drafter and worker, for the log."""
    overlap: OverlapPolicy = field(default_factory=OverlapPolicy)
    num_resyncs: int = 0
    """Times its sequences were to be opened again, because acceptance had collapsed."""
    _alarm: AcceptanceAlarm = field(default_factory=AcceptanceAlarm)

    def record(self, drafted: DraftedRound, num_accepted: int, now_s: float) -> None:
        """Count a verified draft. `now_s`: end of the verification, `time.perf_counter`."""
        verify_s = now_s - drafted.began_s
        self.overlap.record(drafted.num_tokens, drafted.draft_s, verify_s, drafted.is_hit, drafted.is_overlapped)
        if self._alarm.record(drafted.num_tokens, num_accepted):
            self.num_resyncs += 1
            _log.warning("the acceptance of %s has collapsed: its sequences are opened again", self.name)
