"""Sources of tokens behind a clock, for tests of the fused drafter."""

from betoken.draft_worker.commands import Commit
from betoken.drafters.drafter import Drafted
from betoken.drafters.fused.drafter import FusedDrafter
from tests.draft_worker.harness import Bench


class NamedDrafter:
    """Drafts its own number, or raises if `fails` is set. Its drafts are measured by requests only."""

    def __init__(self, number):
        self.number, self.num_rounds, self.fails, self.hangs, self.waiting = number, 0, False, False, []

    @property
    def has_work(self):
        return bool(self.waiting)

    def open(self, sequence):
        pass

    def commit(self, sequence, ids):
        pass

    def request(self, sequence, num_tokens):
        self.waiting.append(sequence)

    def close(self, sequence):
        self.waiting = [other for other in self.waiting if other is not sequence]

    def check_integrity(self):
        pass

    def step(self):
        if self.fails:
            raise RuntimeError("out of order")
        if self.hangs:
            return []
        asked, self.waiting = self.waiting, []
        return [self.propose(sequence, 1) for sequence in asked]

    def propose(self, sequence, num_tokens):
        self.num_rounds += 1
        return Drafted(sequence, [self.number])


class Clocked(Bench):
    """Two sources behind a clock that says how long a round with each takes."""

    def drafters(self):
        self.now_ns = 0
        self.slow, self.quick = NamedDrafter(1), NamedDrafter(2)
        sources = {"slow": self.slow, "quick": self.quick}
        return {**sources, "fused": FusedDrafter(sources, lambda: self.now_ns)}

    def round(self, sequence_id, rates):
        """One round: the source's number says how many tokens it brings in a second."""
        (number,) = self.draft(sequence_id, num_tokens=max(rates.values()))[sequence_id]
        self.now_ns += 1_000_000_000
        entry = self.core._sequences[(1, sequence_id)].sequence
        self.core.apply(Commit((1, sequence_id), len(entry.ids), [9] * rates[number]))
        return number
