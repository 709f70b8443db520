"""Prompt lookup: the text repeats itself, so continue the way an earlier occurrence of the last few tokens went on.

Source: Saxena, "Prompt Lookup Decoding" (2023); here over prompt + output, longest match first, most recent occurrence.
Needs no model and no device.
"""

from dataclasses import dataclass, field

from foretoken.draft_worker.drafter import Drafted, DraftSequence
from foretoken.rpc.errors import InvalidArgumentError


class NgramIndex:
    """Where each n-gram of a growing id list last occurred with a token after it; adding one token is O(max_ngram)."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._num_indexed = 0
        self._next_positions: dict[tuple[int, ...], int] = {}

    def extend(self, ids: list[int]) -> None:
        """Index `ids`, of which everything indexed before is a prefix."""
        # The n-gram that ends at `last` counts once the token after it exists: the suffix never matches itself.
        for last in range(self._num_indexed, len(ids) - 1):
            for n in range(self._min_ngram, min(self._max_ngram, last + 1) + 1):
                self._next_positions[tuple(ids[last + 1 - n : last + 1])] = last + 1
        self._num_indexed = max(self._num_indexed, len(ids) - 1)

    def find(self, ids: list[int]) -> int | None:
        """Position after the most recent earlier occurrence of the longest suffix of `ids`, None without a match."""
        for n in range(min(self._max_ngram, len(ids)), self._min_ngram - 1, -1):
            position = self._next_positions.get(tuple(ids[-n:]))
            if position is not None:
                return position
        return None


@dataclass(slots=True)
class NgramDrafter:
    """Answers each request from the sequence's own index. Settings: `min_ngram`, `max_ngram`, tokens, 1 to 16."""

    min_ngram: int = 1
    max_ngram: int = 4
    _requests: dict[DraftSequence, int] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def open(self, sequence: DraftSequence) -> None:
        min_ngram = _setting(sequence.settings, "min_ngram", self.min_ngram)
        max_ngram = _setting(sequence.settings, "max_ngram", self.max_ngram)
        for name in sequence.settings.keys() - {"min_ngram", "max_ngram"}:
            raise InvalidArgumentError("drafter.settings", name, "must be min_ngram or max_ngram")
        if min_ngram > max_ngram:
            raise InvalidArgumentError(
                "drafter.settings.min_ngram", min_ngram, f"must be at most max_ngram = {max_ngram}"
            )
        index = NgramIndex(min_ngram, max_ngram)
        index.extend(sequence.ids)
        sequence.state = index

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        sequence.state.extend(sequence.ids)

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        self._requests[sequence] = num_tokens

    def close(self, sequence: DraftSequence) -> None:
        self._requests.pop(sequence, None)

    def step(self) -> list[Drafted]:
        requests, self._requests = self._requests, {}
        return [Drafted(seq, self._look_up(seq, num_tokens)) for seq, num_tokens in requests.items()]

    def check_integrity(self) -> None:
        """Nothing is accounted for: an index belongs to its sequence."""

    def _look_up(self, sequence: DraftSequence, num_tokens: int) -> list[int]:
        """Up to `num_tokens` ids; a continuation that runs into the present repeats with its own period."""
        ids = sequence.ids
        position = sequence.state.find(ids)
        if position is None:
            return []
        period = len(ids) - position
        return [ids[position + i % period] for i in range(num_tokens)]


def _setting(settings: dict[str, str], name: str, default: int) -> int:
    text = settings.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 16:
        raise InvalidArgumentError(f"drafter.settings.{name}", text, "must be an integer from 1 to 16")
    return int(text)
