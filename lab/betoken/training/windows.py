"""Training batches as a pure function of (seed, step): nothing to save, nothing to replay on resume.

An epoch cuts the stream into blocks at a fresh random offset and visits them in a fresh random order. A batch is a
fixed number of blocks, which the caller may view as many short windows or as few long ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Windows:
    """Batches of `blocks_per_batch` blocks of `block_tokens` tokens out of `stream` `[num_tokens]`."""

    stream: npt.NDArray[np.uint16]
    block_tokens: int
    blocks_per_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            raise ValueError(f"{len(self.stream)} tokens are too few for one batch of {self.batch_tokens}")

    @property
    def batch_tokens(self) -> int:
        """Predicted tokens of one batch."""
        return self.block_tokens * self.blocks_per_batch

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches that fit behind any offset in [0, block_tokens)."""
        return (len(self.stream) - 1 - self.block_tokens) // self.batch_tokens

    def batch(self, step: int, window_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of `step`, both int64 `[batch_tokens / window_tokens, window_tokens]`."""
        if self.block_tokens % window_tokens:
            raise ValueError(f"window_tokens {window_tokens} does not divide block_tokens {self.block_tokens}")
        epoch, index = divmod(step, self.batches_per_epoch)
        rng = np.random.default_rng([self.seed, epoch])
        offset = int(rng.integers(self.block_tokens))
        order = rng.permutation((len(self.stream) - 1 - offset) // self.block_tokens)
        chosen = order[index * self.blocks_per_batch : (index + 1) * self.blocks_per_batch]
        starts = offset + chosen * self.block_tokens
        # [blocks, block_tokens + 1]: the last token of a block is only a target
        rows = self.stream[starts[:, None] + np.arange(self.block_tokens + 1)].astype(np.int64)
        inputs, targets = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        return inputs.view(-1, window_tokens), targets.view(-1, window_tokens)
