"""Padded batches of samples as a pure function of (seed, step): nothing to save, nothing to replay on resume.

An epoch visits all samples in a fresh random order. Samples of similar length share a batch, so that little is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from betoken.training.samples import Sample

POOL_BATCHES = 16
"""Batches whose samples are sorted by length together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples side by side, padded on the right."""

    ids: torch.Tensor
    """Token ids [B, T], int64; 0 where padded."""
    learnt: torch.Tensor
    """Whether an id is to be predicted [B, T], bool: False for prompts, padding and the first of each row."""
    indices: tuple[int, ...] = ()
    """Index of each row's sample; empty if the samples are not from a list."""

    @property
    def num_learnt(self) -> int:
        return int(self.learnt.sum())

    def parts(self, max_tokens: int) -> Iterator[Rows]:
        """Pieces of whole rows of at most `max_tokens` ids, at least one row each."""
        size = max(1, max_tokens // self.ids.shape[1])
        for start in range(0, len(self.ids), size):
            chosen = slice(start, start + size)
            yield Rows(self.ids[chosen], self.learnt[chosen], self.indices[chosen])

    def to(self, device: torch.device) -> Rows:
        return Rows(self.ids.to(device), self.learnt.to(device), self.indices)


def pad(samples: Sequence[Sample], indices: Sequence[int] = ()) -> Rows:
    """Rows of these samples, as long as the longest."""
    length = max(len(sample.ids) for sample in samples)
    ids = np.zeros((len(samples), length), np.int64)
    learnt = np.zeros((len(samples), length), bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        learnt[row, max(1, sample.prompt_length) : len(sample.ids)] = True
    return Rows(torch.from_numpy(ids), torch.from_numpy(learnt), tuple(indices))


class Batches:
    """Batches of `rows` samples."""

    def __init__(self, samples: Sequence[Sample], rows: int, seed: int) -> None:
        """Raises:
        ValueError: the samples are too few for one batch.
        """
        if len(samples) < rows:
            raise ValueError(f"{len(samples)} samples are too few for a batch of {rows}")
        self._samples, self._rows, self._seed = samples, rows, seed
        self._epoch = -1
        self._order: list[list[int]] = []

    @property
    def per_epoch(self) -> int:
        """Whole batches of one epoch."""
        return len(self._samples) // self._rows

    def __call__(self, step: int) -> Rows:
        """The batch of a step, on the CPU."""
        return pad(self.samples(step), self._chosen(step))

    def samples(self, step: int) -> list[Sample]:
        """The samples of a step's batch."""
        return [self._samples[i] for i in self._chosen(step)]

    def _chosen(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._order[index]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._samples))[: self.per_epoch * self._rows]
        batches: list[list[int]] = []
        pool = POOL_BATCHES * self._rows
        for start in range(0, len(order), pool):
            chosen = sorted(order[start : start + pool].tolist(), key=lambda i: len(self._samples[i].ids))
            batches += [chosen[first : first + self._rows] for first in range(0, len(chosen), self._rows)]
        return [batches[i] for i in rng.permutation(len(batches))]
