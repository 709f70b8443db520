"""Linear recurrences in Triton: one program a sequence, head and block of value columns, with its state in registers.

Rows after the committed ones run along their own path; a row whose parent is the row before goes on from it. A second
kernel stores the inputs that wait, once no program reads the rings any more.
"""

import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.linear_recurrence.rule import Recurrence, RecurrentPool
from betoken.kernels.state_rows import StateRows
from betoken.kernels.triton_math import EXACT

_COLUMNS = 32


def linear_recurrence_triton(
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
    (num_rows, num_key_heads, key_size), (_, num_heads, value_size) = query.shape, value.shape
    out = value.new_empty(value.shape, dtype=pool.state.dtype)
    num_segments = len(rows.states)
    if num_rows == 0 or num_segments == 0:
        return out
    row_starts = rows.row_starts()
    places = (rows.positions, row_starts, rows.states, rows.applied, rows.first_slots, rows.committed)
    paths = (rows.paths.starts, rows.paths.slots) if rows.paths else (rows.positions, rows.positions)
    columns = min(_COLUMNS, triton.next_power_of_2(value_size))
    sizes = {
        "KEY_HEADS": num_key_heads,
        "KEY_SIZE": key_size,
        "HEADS": num_heads,
        "VALUE_SIZE": value_size,
        "GATES": gates.shape[2],
        "WAITING": pool.keys.shape[1],
    }
    _recur[(num_segments, num_heads, triton.cdiv(value_size, columns))](
        *(query, key, value, gates, out),
        *pool,
        *places,
        *paths,
        gates if rates is None else rates,
        rule.scale,
        **sizes,
        BLOCK_D=triton.next_power_of_2(key_size),
        BLOCK_E=columns,
        IS_DELTA=rule.is_delta,
        NORMALIZES=rule.normalizes,
        WEIGHS=rule.weighs,
        HAS_RATES=rates is not None,
        HAS_TREES=rows.paths is not None,
        num_warps=4,
        **EXACT,
    )
    for given, ring in ((key, pool.keys), (value, pool.values), (gates, pool.gates)):
        width = ring[0, 0].numel()
        block = min(1024, triton.next_power_of_2(width))
        _store_waiting[(num_rows, triton.cdiv(width, block))](
            given,
            ring,
            rows.row_segments,
            *places[1:],
            WIDTH=width,
            WAITING=ring.shape[1],
            BLOCK=block,
            num_warps=4,
        )
    return out


@triton.jit
def _slot_at(path_starts, path_slots, row, position, own_position, HAS_TREES: tl.constexpr):
    """The slot of a position on a row's path."""
    slot = position
    if HAS_TREES:
        index = tl.load(path_starts + row + 1) - 1 - (own_position - position)
        is_forked = index >= tl.load(path_starts + row)
        slot = tl.where(is_forked, tl.load(path_slots + tl.where(is_forked, index, 0), mask=is_forked, other=0), slot)
    return slot


@triton.jit
def _direction(vector, NORMALIZES: tl.constexpr):
    """A float32 vector [D], over its length."""
    if NORMALIZES:
        vector = vector * (1.0 / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6))
    return vector


@triton.jit
def _applied(
    state,
    slot,
    first_slot,
    first_row,
    state_index,
    head,
    key,
    value,
    gates,
    waiting_keys,
    waiting_values,
    waiting_gates,
    rate,
    d,
    e,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    GATES: tl.constexpr,
    WAITING: tl.constexpr,
    IS_DELTA: tl.constexpr,
    NORMALIZES: tl.constexpr,
    WEIGHS: tl.constexpr,
    HAS_RATES: tl.constexpr,
):
    """The state [D, E] after the token of a slot: its inputs are in a row of this forward or in the ring."""
    is_own = slot >= first_slot
    row = (first_row + slot - first_slot).to(tl.int64)
    place = state_index * WAITING + slot % WAITING
    at = tl.where(is_own, row, place)
    key_at = (at * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_SIZE + d
    value_at = (at * HEADS + head) * VALUE_SIZE + e
    gate_at = (at * HEADS + head) * GATES
    is_key, is_value = d < KEY_SIZE, e < VALUE_SIZE
    if is_own:
        k = tl.load(key + key_at, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(value + value_at, mask=is_value, other=0.0).to(tl.float32)
        decay, weight = _gates_at(gates + gate_at, d, e, is_key, is_value, GATES, HAS_RATES)
    else:
        k = tl.load(waiting_keys + key_at, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(waiting_values + value_at, mask=is_value, other=0.0).to(tl.float32)
        decay, weight = _gates_at(waiting_gates + gate_at, d, e, is_key, is_value, GATES, HAS_RATES)
    k = _direction(k, NORMALIZES)
    if HAS_RATES:
        state = state * tl.exp(rate * decay[None, :])
    else:
        state = state * tl.exp(decay)[:, None]
    written = v
    if IS_DELTA:
        written = written - tl.sum(state * k[:, None], 0)
    if WEIGHS:
        written = written * weight
    return state + k[:, None] * written[None, :]


@triton.jit
def _gates_at(gates, d, e, is_key, is_value, GATES: tl.constexpr, HAS_RATES: tl.constexpr):
    """The log decays [D] and the weight of what is written; with rates the steps [E], twice."""
    if HAS_RATES:
        decay = tl.load(gates + e, mask=is_value, other=0.0)
        weight = decay
    else:
        weight = tl.load(gates + GATES - 1)
        if GATES == 2:
            decay = tl.zeros(d.shape, tl.float32) + tl.load(gates)
        else:
            decay = tl.load(gates + d, mask=is_key, other=0.0)
    return decay, weight


@triton.jit
def _recur(
    query,  # [R, G, D]
    key,  # [R, G, D]
    value,  # [R, H, E]
    gates,  # [R, H, GATES] float32
    out,  # [R, H, E] float32
    states,  # [N, H, D, E] float32
    waiting_keys,  # [N, W, G, D]
    waiting_values,  # [N, W, H, E]
    waiting_gates,  # [N, W, H, GATES] float32
    positions,  # [R]
    row_starts,  # [S + 1]
    state_indices,  # [S]
    applied,  # [S]
    first_slots,  # [S]
    committed,  # [S]
    path_starts,  # [R + 1]; the paths are read when HAS_TREES only
    path_slots,
    rates,  # [H, D, E] float32, read when HAS_RATES only
    scale,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    GATES: tl.constexpr,
    WAITING: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DELTA: tl.constexpr,
    NORMALIZES: tl.constexpr,
    WEIGHS: tl.constexpr,
    HAS_RATES: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    segment, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_value = e < VALUE_SIZE
    inside = (d < KEY_SIZE)[:, None] & is_value[None, :]
    first_row, end_row = tl.load(row_starts + segment), tl.load(row_starts + segment + 1)
    seen, kept = tl.load(applied + segment), tl.load(committed + segment)
    first_slot = tl.load(first_slots + segment)
    index = tl.load(state_indices + segment).to(tl.int64)
    place = ((index * HEADS + head) * KEY_SIZE + d[:, None]) * VALUE_SIZE + e[None, :]
    state = tl.load(states + place, mask=inside & (seen > 0), other=0.0)
    rate = state
    if HAS_RATES:
        element = (head * KEY_SIZE + d[:, None]) * VALUE_SIZE + e[None, :]
        rate = tl.load(rates + element, mask=inside, other=0.0)
    query_at = head // (HEADS // KEY_HEADS) * KEY_SIZE + d
    for slot in range(seen, kept):
        state = _applied(
            *(state, slot, first_slot, first_row, index, head),
            *(key, value, gates, waiting_keys, waiting_values, waiting_gates, rate, d, e),
            *(KEY_HEADS, KEY_SIZE, HEADS, VALUE_SIZE, GATES, WAITING, IS_DELTA, NORMALIZES, WEIGHS, HAS_RATES),
        )
        if slot >= first_slot:
            row = (first_row + slot - first_slot).to(tl.int64)
            q = tl.load(query + row * KEY_HEADS * KEY_SIZE + query_at, mask=d < KEY_SIZE, other=0.0).to(tl.float32)
            read = tl.sum(state * (_direction(q, NORMALIZES) * scale)[:, None], 0)
            tl.store(out + (row * HEADS + head) * VALUE_SIZE + e, read, mask=is_value)
    tl.store(states + place, state, mask=inside)
    along = state
    begin = first_row.to(tl.int64)
    held = begin - 1
    for offset in range(tl.maximum(0, kept - first_slot), end_row - first_row):
        row = begin + offset
        own = tl.load(positions + row)
        before = _slot_at(path_starts, path_slots, row, own - 1, own, HAS_TREES)
        goes_on = (own > kept) & (before >= first_slot) & (first_row + before - first_slot == held)
        along = tl.where(goes_on, along, state)
        for position in range(tl.where(goes_on, own, kept), own + 1):
            slot = _slot_at(path_starts, path_slots, row, position, own, HAS_TREES)
            along = _applied(
                *(along, slot, first_slot, first_row, index, head),
                *(key, value, gates, waiting_keys, waiting_values, waiting_gates, rate, d, e),
                *(KEY_HEADS, KEY_SIZE, HEADS, VALUE_SIZE, GATES, WAITING, IS_DELTA, NORMALIZES, WEIGHS, HAS_RATES),
            )
        q = tl.load(query + row * KEY_HEADS * KEY_SIZE + query_at, mask=d < KEY_SIZE, other=0.0).to(tl.float32)
        read = tl.sum(along * (_direction(q, NORMALIZES) * scale)[:, None], 0)
        tl.store(out + (row * HEADS + head) * VALUE_SIZE + e, read, mask=is_value)
        held = row


@triton.jit
def _store_waiting(
    given,  # [R, WIDTH]
    ring,  # [N, WAITING, WIDTH]
    row_segments,  # [R]
    row_starts,  # [S + 1]
    state_indices,  # [S]
    applied,  # [S]
    first_slots,  # [S]
    committed,  # [S]
    WIDTH: tl.constexpr,
    WAITING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.load(row_segments + row)
    slot = tl.load(first_slots + segment) + row - tl.load(row_starts + segment)
    waits = (at < WIDTH) & (slot >= tl.load(committed + segment))
    place = tl.load(state_indices + segment).to(tl.int64) * WAITING + slot % WAITING
    tl.store(ring + place * WIDTH + at, tl.load(given + row * WIDTH + at, mask=waits, other=0.0), mask=waits)
