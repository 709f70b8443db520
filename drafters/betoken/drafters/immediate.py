"""Base of drafters that answer a request by themselves, without a batched forward. Knows no way of guessing."""

import logging
from abc import ABC, abstractmethod

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.settings import check_names

logger = logging.getLogger(__name__)


class ImmediateDrafter(ABC):
    """A `Drafter` whose subclasses only propose."""

    def __init__(self) -> None:
        self._requests: dict[DraftSequence, int] = {}

    @abstractmethod
    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        """Guesses at what follows `sequence.ids`; at most `num_tokens`, none is fine."""

    def confidence(self, sequence: DraftSequence) -> int:
        """Confidence of a draft at this moment as a small integer; must be cheap.

        `fused` keeps apart what drafts of different numbers bring; the numbers need no order. Without an override all
        drafts are alike.
        """
        return 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def open(self, sequence: DraftSequence) -> None:
        """Take a sequence in; the default takes no settings."""
        check_names(sequence.settings, ())

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:  # noqa: B027
        """`ids` are the tail of `sequence.ids` already; without an override there is nothing to do."""

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        self._requests[sequence] = num_tokens

    def close(self, sequence: DraftSequence) -> None:
        self._requests.pop(sequence, None)

    def step(self) -> list[Drafted]:
        """Answer every request; a failing one does not affect other sequences."""
        requests, self._requests = self._requests, {}
        return [self._answer(sequence, num_tokens) for sequence, num_tokens in requests.items()]

    def check_integrity(self) -> None:  # noqa: B027
        """It holds nothing to account for."""

    def _answer(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        try:
            drafted = self.propose(sequence, num_tokens)
            drafted.check()
        except Exception:
            logger.exception("%s failed for one sequence", type(self).__name__)
            return Drafted(sequence, [])
        return drafted
