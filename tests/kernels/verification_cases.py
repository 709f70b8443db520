"""Random blocks for the tests of rejection and typical acceptance, and the target's distribution in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from betoken.kernels.rejection import DraftProbs
from betoken.kernels.sample import sample


@dataclass
class Blocks:
    """Arguments of both ops, and their pieces as lists."""

    logits: torch.Tensor
    target_ids: torch.Tensor
    draft_ids: torch.Tensor
    offsets: torch.Tensor
    draft_probs: DraftProbs
    distributions: list[tuple[list[int], list[float]]]
    noise_columns: tuple[torch.Tensor, torch.Tensor]
    sampling_columns: tuple[torch.Tensor, ...]

    @property
    def for_rejection(self) -> tuple:
        head = (self.logits, self.target_ids, self.draft_ids, self.offsets, self.draft_probs)
        return (*head, *self.noise_columns, *self.sampling_columns)

    @property
    def for_typical(self) -> tuple:
        return (self.logits, self.rows_before, self.draft_ids, *self.bounds, *self.sampling_columns)

    @property
    def rows_before(self) -> torch.Tensor:
        """The row that each draft token would follow."""
        blocks = torch.arange(len(self.offsets) - 1, device=self.logits.device)
        nodes = torch.arange(len(self.draft_ids), device=self.logits.device)
        return nodes + torch.repeat_interleave(blocks, self.offsets.diff())

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Epsilon and delta of each row: the paper's and others."""
        is_hot = self.sampling_columns[0] > 1.0
        return tuple(torch.where(is_hot, *values).float() for values in ((0.3, 0.09), (0.1, 0.3)))

    def moved(self, device: torch.device) -> "Blocks":
        probs = self.draft_probs
        return Blocks(
            *(x.to(device) for x in (self.logits, self.target_ids, self.draft_ids, self.offsets)),
            DraftProbs(probs.offsets.to(device), probs.ids.to(device), probs.probs.to(device)),
            self.distributions,
            tuple(x.to(device) for x in self.noise_columns),
            tuple(x.to(device) for x in self.sampling_columns),
        )


def columns(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
    )


def make_blocks(
    rng: np.random.Generator, vocab_size: int, lengths: Sequence[int], dtype: torch.dtype = torch.float32
) -> Blocks:
    """Chains of the given lengths; rows differ in temperature (some 0) and filters, half of the drafts are likely."""
    num_drafts, num_rows = sum(lengths), sum(lengths) + len(lengths)
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)) * 2).to(dtype)
    sampling = (
        torch.from_numpy(rng.choice([0.0, 0.5, 1.0, 1.7], num_rows)).to(torch.float32),
        torch.from_numpy(rng.choice([0, 1, 3, 40], num_rows)).to(torch.int32),
        torch.from_numpy(rng.choice([0.4, 0.9, 1.0], num_rows)).to(torch.float32),
        torch.from_numpy(rng.choice([0.0, 0.05, 0.5], num_rows)).to(torch.float32),
    )
    noise = (
        torch.from_numpy(rng.integers(-(2**63), 2**63, num_rows)),
        torch.from_numpy(rng.integers(0, 100_000, num_rows)),
    )
    blocks = np.repeat(np.arange(len(lengths)), lengths)
    likeliest = logits.float().argmax(dim=1).numpy()[np.arange(num_drafts) + blocks]
    draft_ids = np.where(rng.random(num_drafts) < 0.5, likeliest, rng.integers(0, vocab_size, num_drafts))
    distributions = [_distribution(rng, vocab_size, int(draft_id)) for draft_id in draft_ids]
    return Blocks(
        logits,
        sample(logits, *noise, *sampling),
        torch.from_numpy(draft_ids),
        torch.tensor([0, *np.cumsum(lengths).tolist()]),
        DraftProbs.from_lists(distributions),
        distributions,
        noise,
        sampling,
    )


def _distribution(rng: np.random.Generator, vocab_size: int, draft_id: int) -> tuple[list[int], list[float]]:
    """Ids and float32 probabilities that give the draft token some; nothing for a third of the tokens."""
    if rng.random() < 1 / 3:
        return [], []
    size = int(rng.integers(1, min(64, vocab_size) + 1))
    ids = rng.permutation(vocab_size)[:size].tolist()
    if draft_id not in ids:
        ids[0] = draft_id
    return ids, rng.dirichlet(np.ones(size)).astype(np.float32).tolist()


def target_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """softmax(logits / T) after the filters in the order of their names, in float64; one-hot at T = 0."""
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    if 0 < top_k < len(weights):
        weights[weights < weights[order[top_k - 1]]] = 0
    weights /= weights.sum()
    if top_p < 1:
        above = np.cumsum(weights[order]) - weights[order]
        weights[order[above >= top_p]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()
