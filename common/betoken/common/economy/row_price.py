"""The price of one more row of a forward: the tokens that the worker emits in its time.

A draft token that is accepted less often than that is not worth verifying. Knows numbers only: what was measured at the
start, and what steps took since.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from betoken.common.economy.means import TimeDecayedRate

_STEP_DECAY = 0.98
"""Weight of the past, per forward."""
_MEMORY_S = 2.0
"""Time in which the weight of emitted tokens falls to 1 / e."""
_ROWS_VARIANCE, _SEQUENCES_VARIANCE = 4.0, 0.25
"""Forwards tell as much as what is assumed of them once their rows, or their sequences, vary so much."""


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
        """Median time, nanoseconds."""
        ...


class RowPrice:
    """The price in tokens: what a forward's time grows by with each row, times the tokens emitted meanwhile.

    The growth is fitted to past forwards as a constant, a cost per sequence and a cost per row. The fit is a decayed
    ridge regression towards the table's growth per row. The price is thus that of a row beside all other load of this
    machine. Where all forwards are alike it is the table's.
    """

    def __init__(self, step_costs: Sequence[StepCost]) -> None:
        """`step_costs`: any number of rows and contexts; those of the longest context count."""
        context = max((cost.context for cost in step_costs), default=0)
        self._points = sorted((cost.rows, cost.ns) for cost in step_costs if cost.context == context)
        self._num = 0.0
        """Forwards; the sums over them decay alike."""
        self._sums = [0.0] * 8
        self._rate = TimeDecayedRate()
        self._last_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Emitted of late, while any sequence was open; 0 = not known."""
        return self._rate.mean

    @property
    def price(self) -> float:
        """Tokens per row, at least 0; 0 also where nothing is known."""
        if not self._num:
            return 0.0
        rows, seqs, ns, rows2, seqs2, rows_seqs, rows_ns, seqs_ns = (total / self._num for total in self._sums)
        prior = _ROWS_VARIANCE * self._table_slope(rows)
        rows_rows, seqs_seqs = rows2 - rows * rows + _ROWS_VARIANCE, seqs2 - seqs * seqs + _SEQUENCES_VARIANCE
        rows_seqs -= rows * seqs
        slope = (rows_ns - rows * ns + prior) * seqs_seqs - (seqs_ns - seqs * ns) * rows_seqs
        ns_per_row = slope / (rows_rows * seqs_seqs - rows_seqs * rows_seqs)
        return max(0.0, ns_per_row) * self.tokens_per_s * 1e-9

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

    def _table_slope(self, num_rows: float) -> float:
        """Nanoseconds per row around that number; 0 without a table."""
        if len(self._points) < 2:
            return 0.0
        few, many = max(1.0, num_rows / 2), max(4.0, num_rows * 2)  # far enough apart for times with noise
        return (self.table_ns(many) - self.table_ns(few)) / (many - few)

    def table_ns(self, num_rows: float) -> float:
        """Interpolated between the measured points, and continued beyond them as the outermost two go on."""
        lines = list(pairwise(self._points))
        (rows_0, ns_0), (rows_1, ns_1) = next((line for line in lines if num_rows <= line[1][0]), lines[-1])
        return ns_0 + (ns_1 - ns_0) * (num_rows - rows_0) / (rows_1 - rows_0)
