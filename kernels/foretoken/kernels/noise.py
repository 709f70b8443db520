"""The noise of the coupling: Philox 4x32-10 as a pure function of (seed, position, vocabulary id, stream).

A draft worker and a verify worker that call this with the same arguments get the same bits, on any device and
whatever else is in the batch. It knows no logits.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the counter layout of `tl.philox`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foretoken.kernels import dispatch, native
from foretoken.kernels.float_math import log

# Streams: what a number is for, so that no two uses share it.
COUPLED, ACCEPT, RECOVERED, DRAFTER = 0, 1, 2, 3

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


def seeds_tensor(seeds: Sequence[int] | torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Seeds as the int64 bit pattern of uint64: [R] int64.

    Raises:
        ValueError: a seed outside 0 ... 2^64 - 1, or a tensor that is not [R] int64.
    """
    if isinstance(seeds, torch.Tensor):
        if seeds.dtype != torch.int64 or seeds.dim() != 1:
            raise ValueError(f"seeds must be [R] int64, got {list(seeds.shape)} {seeds.dtype}")
        return seeds
    for seed in seeds:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed {seed} is outside 0 ... 2^64 - 1")
    return torch.tensor([seed - (seed >> 63 << 64) for seed in seeds], dtype=torch.int64, device=device)


def positions_tensor(positions: Sequence[int] | torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Positions as [R] int64.

    Raises:
        ValueError: a tensor that is not [R] int32 or int64.
    """
    if isinstance(positions, torch.Tensor):
        if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 1:
            raise ValueError(f"positions must be [R] int32 or int64, got {list(positions.shape)} {positions.dtype}")
        return positions.to(torch.int64)
    return torch.tensor(positions, dtype=torch.int64, device=device)


def words(
    seeds: Sequence[int] | torch.Tensor, positions: Sequence[int] | torch.Tensor, vocab_size: int, stream: int = COUPLED
) -> torch.Tensor:
    """Random 32-bit words, one per row and vocabulary id.

    Args:
        seeds: [R] Python ints 0 ... 2^64 - 1, or int64 with their bit pattern.
        positions: [R] index in prompt + output of the token being chosen.
        vocab_size: V, at least 1.
        stream: one of COUPLED, ACCEPT, RECOVERED, DRAFTER.
    Returns:
        [R, V] int64 holding uint32 values.
    Raises:
        ValueError: shapes, dtypes or values as above do not hold.
    """
    return _words(*_rows(seeds, positions, vocab_size), vocab_size, stream)


def _rows(
    seeds: Sequence[int] | torch.Tensor, positions: Sequence[int] | torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validated seeds and positions, each [R] int64."""
    key = seeds_tensor(seeds)
    position = positions_tensor(positions, key.device)
    if key.shape != position.shape:
        raise ValueError(f"{key.shape[0]} seeds but {position.shape[0]} positions")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    return key, position


def _words(key: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
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


def uniform(
    seeds: Sequence[int] | torch.Tensor, positions: Sequence[int] | torch.Tensor, vocab_size: int, stream: int = ACCEPT
) -> torch.Tensor:
    """Uniform noise in (0, 1]: [R, V] float32. Arguments and errors as `words`."""
    return to_uniform(words(seeds, positions, vocab_size, stream))


def gumbel(
    seeds: Sequence[int] | torch.Tensor, positions: Sequence[int] | torch.Tensor, vocab_size: int, stream: int = COUPLED
) -> torch.Tensor:
    """Standard Gumbel noise: [R, V] float32. Arguments and errors as `words`."""
    key, position = _rows(seeds, positions, vocab_size)
    _, implementation = dispatch.select(key.device, GUMBEL_IMPLEMENTATIONS)
    return implementation(key, position, vocab_size, stream)


def _gumbel_reference(key: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    return to_gumbel(_words(key, position, vocab_size, stream))


GUMBEL_IMPLEMENTATIONS: dict[dispatch.PathName, Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]] = {
    "reference": _gumbel_reference,
    "native": native.gumbel,
}
