"""The price of one more row of a forward: the tokens that the worker emits in its time.

A draft token that is accepted less often than that is not worth verifying. Knows numbers only: what was measured at the
start, and what steps took since.
"""

from collections.abc import Sequence
from typing import Protocol

from betoken.common.economy.means import DecayedMean, TimeDecayedRate
from betoken.common.step_times import StepTimes

_STEP_DECAY = 0.98
"""Weight of the past, per forward."""
_MEMORY_S = 2.0
"""Time in which the weight of emitted tokens falls to 1 / e."""
_ROWS_VARIANCE, _SEQUENCES_VARIANCE = 4.0, 0.25
"""Variance of rows, or of sequences, at which forwards have the weight of the assumption."""
_LEARNING = 0.05
"""Share of the fit's deviation that the assumption adopts, per forward."""


class StepCost(Protocol):
    """Time of a forward as measured at the start."""

    @property
    def rows(self) -> int:
        """New tokens of one sequence, all with logits."""
        ...

    @property
    def context(self) -> int:
        """Tokens before them."""
        ...

    @property
    def ns(self) -> int:
        """Least time, nanoseconds."""
        ...


class RowPrice:
    """The price in tokens: what a forward's time grows by with each row, times the tokens emitted meanwhile.

    The growth is fitted to past forwards as a constant, a cost per sequence and a cost per row. The fit is a decayed
    ridge regression towards an assumption. The price thus includes all other load of this machine. The
    assumption begins as the table's growth per row and follows the fit: forwards that vary little, or seldom, correct a
    table that was measured under load. If all forwards are alike it stays.
    """

    def __init__(self, step_costs: Sequence[StepCost]) -> None:
        """`step_costs`: any number of rows and contexts; only the longest context counts."""
        context = max((cost.context for cost in step_costs), default=0)
        self._table = StepTimes([(cost.rows, cost.ns) for cost in step_costs if cost.context == context])
        self._num = 0.0
        """Forwards; the sums over them decay alike."""
        self._sums = [0.0] * 8
        self._learned_ns = (0.0, 0.0)
        """Growth that is assumed per row, beyond the table's, and per sequence."""
        self._step_time = DecayedMean(_STEP_DECAY)
        """Forward times over the table's."""
        self._rate = TimeDecayedRate()
        self._last_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Emitted of late, while any sequence was open; 0 = not known."""
        return self._rate.mean

    @property
    def step_time_ratio(self) -> float:
        """Mean time of recent forwards over the time in the table; 0 while either is unknown."""
        return self._step_time.mean

    @property
    def price(self) -> float:
        """Tokens per row, at least 0; 0 also if unknown."""
        if not self._num:
            return 0.0
        assumed_ns, _ = self._assumed_ns()
        beyond_ns, _ = self._beyond_ns()
        return max(0.0, assumed_ns + beyond_ns) * self.tokens_per_s * 1e-9

    def _assumed_ns(self) -> tuple[float, float]:
        """Nanoseconds per row and per sequence, before the forwards that are remembered are looked at."""
        rows, _, ns, *_ = self._sums
        return self._table_slope(rows / self._num, ns / self._num) + self._learned_ns[0], self._learned_ns[1]

    def _beyond_ns(self) -> tuple[float, float]:
        """Fit of those forwards beyond the assumption."""
        rows, seqs, ns, rows2, seqs2, rows_seqs, rows_ns, seqs_ns = (total / self._num for total in self._sums)
        per_row, per_seq = self._assumed_ns()
        rows2, seqs2, rows_seqs = rows2 - rows * rows, seqs2 - seqs * seqs, rows_seqs - rows * seqs
        of_rows = rows_ns - rows * ns - rows2 * per_row - rows_seqs * per_seq
        of_seqs = seqs_ns - seqs * ns - rows_seqs * per_row - seqs2 * per_seq
        rows2, seqs2 = rows2 + _ROWS_VARIANCE, seqs2 + _SEQUENCES_VARIANCE
        determinant = rows2 * seqs2 - rows_seqs * rows_seqs
        return (
            (of_rows * seqs2 - of_seqs * rows_seqs) / determinant,
            (of_seqs * rows2 - of_rows * rows_seqs) / determinant,
        )

    def resume(self, now_s: float) -> None:
        """A sequence opens while none was: the time before does not count."""
        self._last_s = now_s

    def add_tokens(self, num_tokens: int, now_s: float) -> None:
        """Tokens emitted since the last call."""
        seconds = max(0.0, now_s - self._last_s) if self._last_s is not None else 0.0
        self._last_s = now_s
        self._rate.add(num_tokens, seconds, _MEMORY_S)

    def add_forward(self, rows: int, seqs: int, ns: int) -> None:
        """A forward without prefill: its rows, its sequences, its time."""
        products = (rows, seqs, ns, rows * rows, seqs * seqs, rows * seqs, rows * ns, seqs * ns)
        self._num = _STEP_DECAY * self._num + 1.0
        self._sums = [_STEP_DECAY * total + product for total, product in zip(self._sums, products, strict=True)]
        beyond_ns, (per_row, per_seq) = self._beyond_ns(), self._learned_ns
        self._learned_ns = per_row + _LEARNING * beyond_ns[0], per_seq + _LEARNING * beyond_ns[1]
        if (table_ns := self._table.ns(rows)) > 0:
            self._step_time.add(ns / table_ns)

    def _table_slope(self, num_rows: float, ns: float) -> float:
        """Nanoseconds per row around that number, where forwards take `ns`; 0 without a table.

        Sequences and context only add to the table's time. If it is still longer, it was measured on a busy machine.
        """
        slowed = max(1.0, self._table.ns(num_rows) / max(1.0, ns))
        return self._table.token_ns(num_rows) / slowed

    def step_ns(self, num_rows: float) -> float:
        """Expected time of a forward: the table's, corrected by the mean of recent forwards."""
        return self._table.ns(num_rows) * (self.step_time_ratio or 1.0)
