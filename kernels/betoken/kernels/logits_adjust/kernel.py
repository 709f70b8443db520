"""Triton kernels of the logits adjustment; see the package for the contract.

One program takes a run of entries whatever rows they are of, so that rows with long lists do not hold up the others.
Offsets are the caller's word; an id outside the vocabulary is left out, since nothing here can raise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels.triton_math import EXACT

_ENTRIES = 256
_MASKED_IDS = 4096


def logits_adjust(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    penalty: torch.Tensor,
    allowed: torch.Tensor | None,
) -> None:
    """`logits_adjust.logits_adjust` for validated tensors."""
    num_rows, vocab_size = logits.shape
    num_entries = ids.shape[0]
    if num_rows > 0 and num_entries > 0:
        _adjust[(triton.cdiv(num_entries, _ENTRIES),)](
            logits,
            row_offsets,
            ids,
            bias,
            scale,
            penalty,
            num_rows,
            vocab_size,
            num_entries,
            (num_rows - 1).bit_length(),
            BLOCK=_ENTRIES,
            num_warps=4,
            **EXACT,
        )
    if num_rows > 0 and allowed is not None:
        grid = (num_rows, triton.cdiv(vocab_size, _MASKED_IDS))
        _mask[grid](logits, allowed, vocab_size, allowed.shape[1], BLOCK=_MASKED_IDS, num_warps=4, **EXACT)


@triton.jit(do_not_specialize=["num_rows", "num_entries", "num_halvings"])
def _adjust(
    logits,  # [R, V] float32
    row_offsets,  # [R + 1] int64
    ids,  # [N] int64
    bias,  # [N] float32
    scale,  # [N] float32
    penalty,  # [N] float32
    num_rows,
    vocab_size,
    num_entries,
    num_halvings,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    # Bisection: row_offsets[row] <= entry < row_offsets[end] throughout.
    row = tl.zeros([BLOCK], tl.int64)
    end = row + num_rows
    for _ in range(num_halvings):
        middle = (row + end) // 2
        is_at_or_after = tl.load(row_offsets + middle) <= entry
        row = tl.where(is_at_or_after, middle, row)
        end = tl.where(is_at_or_after, end, middle)
    token_id = tl.load(ids + entry, mask=is_entry, other=-1)
    is_known = (token_id >= 0) & (token_id < vocab_size)
    place = logits + row * vocab_size + token_id
    value = tl.load(place, mask=is_known, other=0.0) + tl.load(bias + entry, mask=is_entry, other=0.0)
    factor = tl.load(scale + entry, mask=is_entry, other=1.0)
    value = tl.where(value < 0.0, value * factor, tl.div_rn(value, factor))
    tl.store(place, value - tl.load(penalty + entry, mask=is_entry, other=0.0), mask=is_known)


@triton.jit
def _mask(
    logits,  # [R, V] float32
    allowed,  # [R, W] int32, W = ceil(V / 32)
    vocab_size,
    num_words,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_id = token_id < vocab_size
    word = tl.load(allowed + row * num_words + (token_id >> 5), mask=is_id, other=-1)
    is_refused = is_id & (((word >> (token_id & 31)) & 1) == 0)
    tl.store(logits + row * vocab_size + token_id, float("-inf"), mask=is_refused)
