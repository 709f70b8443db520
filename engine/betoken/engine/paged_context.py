"""The context of one forward with dispatched ops, on any device: keys and values in pages, and states."""

import torch
from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.batch import Batch
from betoken.engine.kv_pool import KvPool
from betoken.engine.state_pool import StatePool
from betoken.kernels.attention import attention
from betoken.kernels.kv_write import kv_write
from betoken.kernels.linear_recurrence import Recurrence, linear_recurrence
from betoken.kernels.rows import PagedRows
from betoken.kernels.short_conv import short_conv
from betoken.kernels.state_conv import state_conv
from betoken.kernels.state_rows import StateRows


class PagedContext:
    """Context of one forward over the pools."""

    def __init__(
        self, pool: KvPool, rows: PagedRows, states: StatePool | None = None, state_rows: StateRows | None = None
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._states = states
        self._state_rows = state_rows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write the new keys and values, then attend to all visible ones."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        kv_write(key, value, keys, values, self._rows)
        return attention(query, keys, values, self._rows, **scoring._asdict())

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Write the new inputs, then convolve along each row's path."""
        keys = self._pool.keys[layer]
        kv_write(x.unsqueeze(1), x.new_empty(len(x), 1, 0), keys, self._pool.values[layer], self._rows)
        return short_conv(keys.squeeze(2), weight, bias, self._rows)

    def convolve_states(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `AttentionContext.convolve_states`."""
        assert self._states is not None and self._state_rows is not None
        return state_conv(x, weight, bias, self._states.rings[layer], self._state_rows)

    def recur(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        rule: Recurrence,
        rates: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext.recur`."""
        assert self._states is not None and self._state_rows is not None
        pool = self._states.recurrent[layer]
        query, key, value, gates = (tensor.contiguous() for tensor in (query, key, value, gates))
        return linear_recurrence(query, key, value, gates, pool, self._state_rows, rule, rates)


def state_rows_of(batch: Batch, rows: PagedRows, device: torch.device) -> StateRows | None:
    """Slots of the batch's states; padding rows after the batch are a separate sequence with state 0."""
    if batch.state_columns is None:
        return None
    num_sequences = len(rows.page_starts) - 1
    columns = [[*column, *[0] * (num_sequences - len(column))] for column in batch.state_columns.tolist()]
    states, applied, first_slots, committed = torch.tensor(columns, dtype=torch.int32, device=device)
    return StateRows(rows.positions, rows.row_segments, states, applied, first_slots, committed, rows.paths)
