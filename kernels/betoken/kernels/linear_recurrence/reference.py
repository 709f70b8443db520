"""Reference of linear recurrences in torch: one row and one term after another."""

import torch
from torch import Tensor

from betoken.kernels.linear_recurrence.rule import Recurrence, RecurrentPool
from betoken.kernels.state_rows import HostRows, StateRows

_LANES = 16
_Inputs = tuple[Tensor, Tensor, Tensor]  # key [G, D], value [H, E], gates [H, F + 1] or [H, E]


def linear_recurrence_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    pool: RecurrentPool,
    rows: StateRows,
    rule: Recurrence,
    rates: Tensor | None = None,
) -> Tensor:
    """See `betoken.kernels.linear_recurrence.linear_recurrence`."""
    host, num_waiting = HostRows(rows), pool.keys.shape[1]
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)

    def inputs(segment: int, slot: int) -> _Inputs:
        row = host.row_at(segment, slot)
        if row is not None:
            return key[row], value[row], gates[row]
        at = (host.states[segment], slot % num_waiting)
        return pool.keys[at], pool.values[at], pool.gates[at]

    for segment, state in enumerate(host.states):
        begin, end = host.row_starts[segment], host.row_starts[segment + 1]
        applied, committed = host.applied[segment], host.committed[segment]
        now = pool.state[state].clone() if applied else torch.zeros_like(pool.state[state])
        for slot in range(applied, committed):
            now = _applied(now, inputs(segment, slot), rule, rates)
            row = host.row_at(segment, slot)
            if row is not None:
                out[row] = _read(now, query[row], rule)
        pool.state[state] = now
        for row in range(begin + max(0, committed - host.first_slots[segment]), end):
            along = now
            for position in range(committed, host.positions[row] + 1):
                along = _applied(along, inputs(segment, host.slot_at(row, position)), rule, rates)
            out[row] = _read(along, query[row], rule)
        for row in range(begin, end):
            slot = host.first_slots[segment] + row - begin
            if slot >= committed:
                at = (state, slot % num_waiting)
                pool.keys[at], pool.values[at], pool.gates[at] = key[row], value[row], gates[row]
    return out


def _applied(state: Tensor, inputs: _Inputs, rule: Recurrence, rates: Tensor | None) -> Tensor:
    """The state [H, D, E] after one more token."""
    key, value, gates = inputs
    spread = _spread(_direction(key, rule), len(value))  # [H, D]
    if rates is not None:
        state = state * (rates * gates[:, None, :]).exp()
        written = value.float() * gates if rule.weighs else value.float()
        return state + spread[:, :, None] * written[:, None, :]
    state = state * gates[:, :-1].exp()[:, :, None]
    written = value.float()
    if rule.is_delta:
        written = written - _sum(state, spread)
    return state + spread[:, :, None] * (written * gates[:, -1:])[:, None, :]


def _read(state: Tensor, query: Tensor, rule: Recurrence) -> Tensor:
    return _sum(state, _spread(_direction(query, rule) * rule.scale, len(state)))


def _direction(vectors: Tensor, rule: Recurrence) -> Tensor:
    vectors = vectors.float()
    if not rule.normalizes:
        return vectors
    lanes = torch.zeros(len(vectors), _LANES, device=vectors.device)
    padded = torch.nn.functional.pad(vectors, (0, -vectors.shape[1] % _LANES))
    for begin in range(0, padded.shape[1], _LANES):
        part = padded[:, begin : begin + _LANES]
        lanes = lanes + part * part
    while lanes.shape[1] > 1:
        first, second = lanes.chunk(2, dim=1)
        lanes = first + second
    return vectors * (1.0 / (lanes + 1e-6).sqrt())


def _spread(vectors: Tensor, num_heads: int) -> Tensor:
    return vectors.repeat_interleave(num_heads // len(vectors), dim=0)


def _sum(state: Tensor, weights: Tensor) -> Tensor:
    """State [H, D, E] and weights [H, D] -> [H, E], in ascending order of D."""
    total = torch.zeros_like(state[:, 0])
    for index in range(state.shape[1]):
        total = total + state[:, index] * weights[:, index, None]
    return total
