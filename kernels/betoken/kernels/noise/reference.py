"""Torch reference of the noise; see the package for the contract.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the counter layout of `tl.philox`.
"""

from __future__ import annotations

import torch

from betoken.kernels.float_math import log

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_CALLS_PER_BLOCK = 256
_IDS_PER_BLOCK = 4 * _CALLS_PER_BLOCK  # id v takes word (v>>8)&3 of call (v>>10)<<8 | (v&255)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key_low: torch.Tensor, key_high: torch.Tensor) -> Words:
    """Philox 4x32-10 on uint32 values held in int64 tensors that broadcast together; four words, same holding."""
    c0, c1, c2, c3 = counter
    k0, k1 = key_low, key_high
    for i in range(_NUM_ROUNDS):
        if i > 0:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        # The products are exact as 64-bit patterns; >> is arithmetic, so the high half needs the mask.
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product2 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = product2 & _MASK, product0 & _MASK
    return c0, c1, c2, c3


def words(key: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """`noise.words` for validated tensors: [R, V] int64."""
    num_blocks = -(-vocab_size // _IDS_PER_BLOCK)
    num_lanes = min(_CALLS_PER_BLOCK, vocab_size)  # a small vocabulary takes word 0 of its first calls
    calls = torch.arange(num_blocks * num_lanes, device=key.device)
    row = key.unsqueeze(1)
    counter = (calls.unsqueeze(0), (position & _MASK).unsqueeze(1), torch.full_like(row, stream), torch.zeros_like(row))
    four = philox(counter, row & _MASK, (row >> 32) & _MASK)
    # [R, blocks, lanes] each -> [R, blocks, 4, lanes]: ids in order.
    ordered = torch.stack([word.view(-1, num_blocks, num_lanes) for word in four], dim=2)
    return ordered.view(-1, num_blocks * 4 * num_lanes)[:, :vocab_size]


def to_uniform(word: torch.Tensor) -> torch.Tensor:
    """uint32 values in int64 -> float32 in (0, 1]: float32(x) * 2^-32 + 2^-33."""
    return word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)


def to_gumbel(word: torch.Tensor) -> torch.Tensor:
    """uint32 values in int64 -> float32 standard Gumbel values in [-2.9, 22.9], never infinite."""
    u = to_uniform(word)
    # E = -log(1 - u) is a standard exponential; near 0 its series keeps the bits that 1 - u would lose.
    small = ((u / u.new_full((), 3.0)).add_(0.5).mul_(u)).add_(1.0).mul_(u)
    large = log(1.0 - u.clamp_max(1.0 - 2.0**-24)).neg_()
    return log(torch.where(u < 2.0**-7, small, large)).neg_()


def gumbel(key: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """`noise.gumbel` for validated tensors, any device."""
    return to_gumbel(words(key, position, vocab_size, stream))
