"""Whether a forward starts at once or waits for blocks that are about to come.

All sequences of a forward get their results together, and their next drafts arrive one after another. If a forward
takes as long with one block as with many, as on a GPU, a forward that starts with the first block keeps the others
waiting for its whole length. Two groups in turn would each get half of the device. If each token takes its own
time there is little to wait for. Knows times and numbers only.
"""

from collections.abc import Callable, Iterable

_MEMORY = 0.95
"""Weight of the past, per block."""
_LEAST_DEVIATION_NS = 50_000.0
_SHARE = 0.6
"""Part of the time saved that may be lost: routers and drafters work while others' forwards run, and wait here."""
_LATE = 4.0
"""Mean deviations after which a block that should have come is not waited for."""


class Gathering:
    """Learns how long blocks are under way; weighs the time a device idles against what one forward for all saves."""

    def __init__(self, forward_ns: Callable[[float], float]) -> None:
        """`forward_ns`: duration of a forward by its number of rows."""
        self._forward_ns = forward_ns
        self._num_blocks = 0
        self._mean_ns = 0.0
        """From a verification result to the sequence's next block."""
        self._deviation_ns = 0.0
        self._mean_rows = 0.0
        """Mean rows of a block."""

    def add_block(self, turn_ns: float, num_rows: int) -> None:
        """A block came `turn_ns` after the last verification result of its sequence."""
        turn_ns = max(0.0, turn_ns)
        self._num_blocks += 1
        weight = max(1.0 - _MEMORY, 1.0 / self._num_blocks)
        if self._num_blocks > 1:  # a sequence with a slow client says little about the others
            turn_ns = min(turn_ns, self._mean_ns + 2.0 * _LATE * max(self._deviation_ns, _LEAST_DEVIATION_NS))
            self._deviation_ns += weight * (abs(turn_ns - self._mean_ns) - self._deviation_ns)
        self._mean_ns += weight * (turn_ns - self._mean_ns)
        self._mean_rows += weight * (num_rows - self._mean_rows)

    def wait_ns(self, idle_ns: int, num_ready: int, num_rows: int, room: int, since_sent_ns: Iterable[int]) -> float:
        """Nanoseconds that a forward of `num_ready` sequences and `num_rows`, `idle_ns` after the last, waits for more;
        0 to start now.

        `room`: further rows it could take. `since_sent_ns`: for each sequence without a draft, the time since its
        last verification result.
        """
        if not self._num_blocks or not num_ready:
            return 0.0
        deviation_ns = max(self._deviation_ns, _LEAST_DEVIATION_NS)
        left_ns = [
            self._mean_ns - since_ns if since_ns < self._mean_ns else deviation_ns
            for since_ns in since_sent_ns
            if since_ns < self._mean_ns + _LATE * deviation_ns
        ]
        others = self._mean_rows * len(left_ns)
        if not left_ns or others > room:  # or there would be as many forwards as before
            return 0.0
        saved_ns = self._forward_ns(num_rows) + self._forward_ns(others) - self._forward_ns(num_rows + others)
        wait_ns = max(left_ns)  # for all or none: two alternating groups cannot be merged step by step
        may_be_lost_ns = _SHARE * min(1.0, len(left_ns) / num_ready) * saved_ns
        # A whole turn has to be as short: it is what each forward then waits for.
        return wait_ns if max(self._mean_ns, idle_ns + wait_ns) < may_be_lost_ns else 0.0
