"""Reserves a request's tokens before it is admitted: requests that come at once would all see the same tokens left.

Knows accounts; what was used its caller reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from betoken.router.policy.account import Account


class Reservation:
    """Tokens reserved for one request; what was not used by the end of the block is given back."""

    def __init__(self, accounts: Sequence[Account], num_tokens: int) -> None:
        """Reserve `num_tokens`, the most that the request may use, of all `accounts`, or of none.

        Raises:
            ResourceExhaustedError: one of them has too few left; carries when to retry.
        """
        for account in accounts:
            account.check_tokens(num_tokens)
        self._accounts = [account for account in accounts if account.limits.tokens_per_minute is not None]
        self._num_unused = num_tokens
        for account in self._accounts:
            account.charge(num_tokens)

    def use(self, num_tokens: int) -> None:
        """Tokens were read or written."""
        self._num_unused -= num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for account in self._accounts:
            account.charge(-self._num_unused)
