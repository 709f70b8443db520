"""Bounds the bytes of all requests that are read and not yet at work, so that no number of large ones fills the memory.

Knows sizes only.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from betoken.common.errors import ResourceExhaustedError

_RETRY_AFTER_S = 1.0


class ByteBudget:
    """A bounded number of bytes for all waiting requests. One request may take them all, and more while no other
    waits."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes held."""

    def hold(self, num_bytes: int) -> HeldBytes:
        """Take `num_bytes`, for as long as the result is entered.

        Raises:
            ResourceExhaustedError: the others hold too many; carries when to retry.
        """
        held = HeldBytes(self)
        held.add(num_bytes)
        return held


class HeldBytes:
    """One request's share."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def add(self, num_bytes: int) -> None:
        """Take more. Raises as `ByteBudget.hold`."""
        budget = self._budget
        others = budget.num_bytes - self._num_bytes
        if others and budget.num_bytes + num_bytes > budget.max_bytes:
            raise ResourceExhaustedError(
                f"requests that wait hold {others} bytes; with {self._num_bytes + num_bytes} more they would hold"
                f" more than {budget.max_bytes}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_bytes += num_bytes
        budget.num_bytes += num_bytes

    def release(self) -> None:
        """Give all back; idempotent."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0
