"""Triton kernel of the Gumbel noise; see the package for the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels.triton_math import EXACT, gumbel_f32, noise_words, token_id

_CALLS = 256


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """`noise.gumbel` for validated tensors."""
    out = torch.empty((seeds.shape[0], vocab_size), dtype=torch.float32, device=seeds.device)
    if seeds.shape[0] > 0:
        grid = (triton.cdiv(vocab_size, 4 * _CALLS), seeds.shape[0])
        _gumbel[grid](seeds, positions, out, vocab_size, stream, CALLS=_CALLS, num_warps=4, **EXACT)
    return out


@triton.jit
def _gumbel(
    seeds,  # [R] int64
    positions,  # [R] int64
    out,  # [R, V] float32
    vocab_size,
    stream,
    CALLS: tl.constexpr,
):
    row = tl.program_id(1)
    call = tl.program_id(0) * CALLS + tl.arange(0, CALLS)
    words = noise_words(tl.load(seeds + row), tl.load(positions + row), stream, call)
    for i in tl.static_range(4):
        ids = token_id(call, i)
        tl.store(out + row.to(tl.int64) * vocab_size + ids, gumbel_f32(words[i]), mask=ids < vocab_size)
