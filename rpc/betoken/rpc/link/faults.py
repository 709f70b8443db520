"""A worker's reports of faults of its whole link: the first is logged, others are counted, too many end the link.

Knows no sequences; a fault of one of those is its session's.
"""

import logging
import time

from betoken.common.errors import BetokenError, FailedPreconditionError

_log = logging.getLogger(__name__)

MAX_LINK_FAULTS = 16
"""Most faults of a link within `PERIOD_S`."""
PERIOD_S = 60.0


class LinkFaults:
    """The faults of one link, over all its connections."""

    def __init__(self, worker: str) -> None:
        """`worker` names it in the log."""
        self._worker = worker
        self._num = 0
        self._since_s = time.monotonic()

    def take(self, error: BetokenError) -> None:
        """One more came.

        Raises:
            FailedPreconditionError: too many did; raised in `on_frame` it ends the link.
        """
        if time.monotonic() - self._since_s > PERIOD_S:
            self.log_count()
        if self._num == 0:
            self._since_s = time.monotonic()
            _log.error("%s: %s", self._worker, error)
        self._num += 1
        if self._num > MAX_LINK_FAULTS:
            raise FailedPreconditionError(f"more than {MAX_LINK_FAULTS} faults of the link within {PERIOD_S:g} s")

    def log_count(self) -> None:
        """Log the number of faults in addition to the logged one, and reset it."""
        if self._num > 1:
            _log.error("%s: %d more faults of the link", self._worker, self._num - 1)
        self._num = 0
