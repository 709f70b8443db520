"""Number and weight of a row's ids above a value, in exact integers; Triton.

A value is logit / temperature, compared by its key. Reads the groups that `narrowing` lists, and the whole row only
on request.
"""

import triton
import triton.language as tl

from betoken.kernels.sample.narrowing import load_listed
from betoken.kernels.triton_math import exp_f32

LEAST_KEY: tl.constexpr = tl.constexpr(-2139095041)  # of -inf


@triton.jit
def key_of(scaled):
    """Integers in the order of the floats they stand for; both zeros are one."""
    bits = (scaled + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(scaled, top):
    """The integer weight of `reference.WEIGHT_ONE`."""
    return (exp_f32(scaled - top) * 1099511627776.0).to(tl.int64)


@triton.jit
def weight_above(start, heat, top, key, groups, row, count, vocab_size, num_groups, GROUPS: tl.constexpr):
    """Number of listed ids above a key, and their weight."""
    number = tl.zeros([GROUPS, 16, 2, 2], tl.int32)
    weight = tl.zeros([GROUPS, 16, 2, 2], tl.int64)
    place = 0
    while place < count:
        x, _, _ = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
        scaled = tl.div_rn(x, heat)
        is_above = (key_of(scaled) > key) & (x > float("-inf"))
        number += is_above.to(tl.int32)
        weight += tl.where(is_above, _weight(scaled, top), 0)
        place += GROUPS
    return tl.sum(number), tl.sum(weight)


@triton.jit
def kth_key(start, heat, k, top, groups, row, count, vocab_size, num_groups, GROUPS: tl.constexpr):
    """The key of the k-th largest quotient: bisection between keys that occur."""
    low = tl.full([], LEAST_KEY, tl.int32)
    high = key_of(top)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        number = tl.zeros([GROUPS, 16, 2, 2], tl.int32)
        next_above = tl.full([GROUPS, 16, 2, 2], 0x7FFFFFFF, tl.int32)
        next_below = tl.full([GROUPS, 16, 2, 2], LEAST_KEY, tl.int32)
        place = 0
        while place < count:
            x, _, _ = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
            key = key_of(tl.div_rn(x, heat))
            is_above = key > middle
            number += is_above.to(tl.int32)
            next_above = tl.where(is_above, tl.minimum(next_above, key), next_above)
            next_below = tl.where(is_above, next_below, tl.maximum(next_below, key))
            place += GROUPS
        if tl.sum(number) >= k:
            low = tl.min(next_above)
        else:
            high = tl.max(next_below)
    return high


@triton.jit
def weight_of_row(start, heat, top, vocab_size):
    """The weight of the whole row: read only if the approximate sum is not conclusive."""
    weight = tl.zeros([4096], tl.int64)
    first = 0
    while first < vocab_size:
        ids = first + tl.arange(0, 4096)
        x = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        weight += _weight(tl.div_rn(x, heat), top)
        first += 4096
    return tl.sum(weight, axis=0)
