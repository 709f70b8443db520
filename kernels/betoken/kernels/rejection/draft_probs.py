"""The distributions that draft tokens were sampled from, few ids each. Knows no wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from betoken.kernels import checks

MAX_DRAFT_PROBS = 64
"""Ids of one distribution at most."""


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Draft token i has the probabilities [offsets[i], offsets[i + 1]); none at all means that it was certain."""

    offsets: torch.Tensor  # [N + 1] int64
    ids: torch.Tensor  # [M] int64, unique within a draft token
    probs: torch.Tensor  # [M] float32, at least 0

    @classmethod
    def from_lists(
        cls, distributions: Sequence[tuple[Sequence[int], Sequence[float]]], device: torch.device | None = None
    ) -> DraftProbs:
        """Columns made of (ids, probabilities) per draft token, both empty if it was certain."""
        offsets = [0]
        for ids, _ in distributions:
            offsets.append(offsets[-1] + len(ids))
        return cls(
            torch.tensor(offsets, dtype=torch.int64, device=device),
            torch.tensor([token_id for ids, _ in distributions for token_id in ids], dtype=torch.int64, device=device),
            torch.tensor([prob for _, probs in distributions for prob in probs], dtype=torch.float32, device=device),
        )

    def check(self, num_drafts: int, vocab_size: int, device: torch.device) -> None:
        """Refuses what does not describe `num_drafts` draft tokens.

        Raises:
            ValueError: a shape, dtype or device other than above; on CPU also ids, offsets or counts out of range.
        """
        num_probs = self.ids.numel()
        checks.check_column("draft_probs.offsets", self.offsets, num_drafts + 1, torch.int64, device)
        checks.check_column("draft_probs.ids", self.ids, num_probs, torch.int64, device)
        checks.check_column("draft_probs.probs", self.probs, num_probs, torch.float32, device)
        checks.check_offsets("draft_probs.offsets", self.offsets, num_probs)
        checks.check_ids("draft_probs.ids", self.ids, vocab_size)
        if device.type == "cpu" and num_drafts and int(self.offsets.diff().max()) > MAX_DRAFT_PROBS:
            raise ValueError(f"draft_probs: a draft token has more than {MAX_DRAFT_PROBS} ids")
