"""The noise of the coupling: Philox 4x32-10 as a pure function of (seed, position, vocabulary id, stream).

Calls with the same arguments give the same bits, on any device and in any batch; draft and verify workers rely on it.
It knows no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from betoken.kernels import dispatch, native
from betoken.kernels.noise import reference
from betoken.kernels.noise.reference import to_gumbel, to_uniform

__all__ = [
    "ACCEPT", "COUPLED", "DRAFTER", "RECOVERED",
    "gumbel", "positions_tensor", "seeds_tensor", "to_gumbel", "to_uniform", "uniform", "words",
]  # fmt: skip

# Streams: what a number is for, so that no two uses share it.
COUPLED, ACCEPT, RECOVERED, DRAFTER = 0, 1, 2, 3

GUMBEL_IMPLEMENTATIONS: dict[dispatch.PathName, Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]] = {
    "reference": reference.gumbel,
    "native": native.gumbel,
    "triton": dispatch.triton("betoken.kernels.noise.kernel", "gumbel"),
}


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
    return reference.words(*_rows(seeds, positions, vocab_size), vocab_size, stream)


def _rows(
    seeds: Sequence[int] | torch.Tensor, positions: Sequence[int] | torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validated seeds and positions, each [R] int64 and contiguous, as kernels take them."""
    key = seeds_tensor(seeds)
    position = positions_tensor(positions, key.device)
    if key.shape != position.shape:
        raise ValueError(f"{key.shape[0]} seeds but {position.shape[0]} positions")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    return key.contiguous(), position.contiguous()


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
