"""A pretend language model over token ids: the next id is a hash of everything before it, so exact outputs are known.

Replaces the target and the draft model in tests and benchmarks of the router alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from betoken.v1.types_pb2 import OpenSequence

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Deterministic in prompt, output and, above temperature 0, in the seed."""

    vocab_size: int = 1000
    eos_token_id: int = 0
    eos_period: int = 0
    """On average one in so many tokens is EOS; 0 = only by chance of the hash."""
    script: tuple[int, ...] | None = None
    """Output ids to give instead, by position in the output, and EOS after them."""

    def cursor(self, entry: OpenSequence) -> FakeCursor:
        """A sequence as it was opened, committed ids included."""
        sampling = entry.sampling
        salt = 0 if sampling.temperature == 0 else _mix(sampling.seed ^ 0x5EED)
        masked = frozenset(entry.eos_token_ids) | frozenset(sampling.stop_token_ids)
        cursor = FakeCursor(self, salt, masked, sampling.min_new_tokens)
        for token_id in entry.prompt_ids:
            cursor.state = _mix(cursor.state ^ token_id)
        cursor.push_all(entry.committed_ids)
        return cursor

    def generate(self, entry: OpenSequence, num_tokens: int) -> list[int]:
        """The target's tokens after the entry's prompt and committed ids, whatever the drafts; runs past EOS."""
        cursor = self.cursor(entry)
        ids = []
        for _ in range(num_tokens):
            ids.append(cursor.next_id())
            cursor.push(ids[-1])
        return ids


@dataclass(slots=True)
class FakeCursor:
    """A position in a sequence."""

    model: FakeModel
    salt: int
    masked_ids: frozenset[int]
    min_new_tokens: int
    state: int = 0
    num_output: int = 0

    def copy(self) -> FakeCursor:
        """An independent cursor at the same position."""
        return replace(self)

    def push(self, token_id: int) -> None:
        """Append one output id."""
        self.state = _mix(self.state ^ token_id)
        self.num_output += 1

    def push_all(self, ids: Iterable[int]) -> None:
        """Append output ids."""
        for token_id in ids:
            self.push(token_id)

    def next_id(self) -> int:
        """The target's own token at this position."""
        model = self.model
        if model.script is not None:
            return model.script[self.num_output] if self.num_output < len(model.script) else model.eos_token_id
        word = _mix(self.state ^ self.salt)
        is_masked = self.num_output < self.min_new_tokens
        if model.eos_period and not is_masked and (word >> 32) % model.eos_period == 0:
            return model.eos_token_id
        token_id = word % model.vocab_size
        while (is_masked and token_id in self.masked_ids) or (model.eos_period and token_id == model.eos_token_id):
            word = _mix(word)
            token_id = word % model.vocab_size
        return token_id

    def guess(self, agreement: float) -> int:
        """A drafter's token at this position: the target's with probability `agreement`, else another."""
        token_id = self.next_id()
        if _mix(self.state ^ 0xD4AF7) % 1000 < agreement * 1000:
            return token_id
        return (token_id + 1) % self.model.vocab_size


def sequence(prompt_ids: Sequence[int], committed_ids: Sequence[int] = (), seed: int = 0) -> OpenSequence:
    """An entry for `FakeModel` in tests: greedy when `seed` is 0."""
    entry = OpenSequence(prompt_ids=prompt_ids, committed_ids=committed_ids)
    entry.sampling.temperature = 1.0 if seed else 0.0
    entry.sampling.seed = seed
    return entry


def _mix(word: int) -> int:
    """One round of splitmix64."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
