"""The vectors by position that are added to the embeddings of one sequence. Knows positions, not what reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_BLOCK = 64
"""Positions of a tensor."""


@dataclass(slots=True)
class PositionVectors:
    """Kept as long as the sequence is open, since its KV may be computed again. Unknown vectors are zero."""

    _blocks: list[Tensor] = field(default_factory=list)
    """Tensors [_BLOCK, H]."""
    _known: bytearray = field(default_factory=lambda: bytearray(b"\x01"))
    """1 for each position whose vector is known; position 0 has none, that is, zero."""
    shared_length: int = 0
    """Leading slots with KV of known vectors, which other sequences may take over."""

    @property
    def length(self) -> int:
        """Positions up to the last known one."""
        return len(self._known)

    def add(self, first: int, vectors: Tensor) -> None:
        """Take in the vectors [n, H] of positions from `first` on."""
        end = first + len(vectors)
        while len(self._blocks) * _BLOCK < end:
            self._blocks.append(vectors.new_zeros(_BLOCK, vectors.shape[1]))
        self._known.extend(bytes(max(0, end - len(self._known))))
        self._known[first:end] = b"\x01" * len(vectors)
        for block in range(first // _BLOCK, -(-end // _BLOCK)):
            start = block * _BLOCK
            own = slice(max(first, start) - first, min(end, start + _BLOCK) - first)
            self._blocks[block][max(0, first - start) :][: own.stop - own.start] = vectors[own]

    def rows(self, start: int, end: int, num_repeats: int) -> Tensor | None:
        """Vectors [end - start + num_repeats, H] of positions [start, end), of which the last is repeated; None if no
        vector is known yet. `end`: at most `length`."""
        if not self._blocks:
            return None
        parts = [
            self._blocks[block][max(0, start - block * _BLOCK) : end - block * _BLOCK]
            for block in range(start // _BLOCK, -(-end // _BLOCK))
        ]
        found = torch.cat(parts)
        return torch.cat((found, found[-1:].expand(num_repeats, -1))) if num_repeats else found

    def num_known(self, start: int, end: int) -> int:
        """Positions from `start` on whose vectors are known, up to the first unknown one or `end`."""
        unknown = self._known.find(0, start, end)
        return max(0, (min(end, self.length) if unknown < 0 else unknown) - start)
