"""Rows that teach a model to predict several tokens in one forward, and the attention between them.

Depth 0 is the text itself. A row of depth i at position p is a mask token that predicts the token at p + 1. It sees the
text up to p - i and the masks of depths 1 to i at p - i + 1, ..., p, as when drafts are made. Rows of all drafts share
one forward. A row of depth i is kept only if the row before it, of depth i - 1, is kept (conditional drop).
Source: PARD, An et al., arXiv:2504.18583.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ParallelRows:
    """Rows of a forward, by depth, then by position."""

    depths: torch.Tensor
    """[N] int64, 0 to K - 1."""
    positions: torch.Tensor
    """[N] int64; 0, ..., T - 1 at depth 0."""

    @classmethod
    def drawn(
        cls, length: int, num_depths: int, keep_share: float, least_share: float, generator: torch.Generator
    ) -> ParallelRows:
        """Rows of a text of T ids; depth i keeps a share of keep_share^i, but not less than `least_share`."""
        kept = torch.arange(length)
        positions = [kept]
        for depth in range(1, num_depths):
            candidates = kept[kept < length - 1] + 1
            num_kept = min(len(candidates), round(length * max(keep_share**depth, least_share)))
            kept = candidates[torch.randperm(len(candidates), generator=generator)[:num_kept]].sort().values
            positions.append(kept)
        depths = [torch.full_like(kept, depth) for depth, kept in enumerate(positions)]
        return cls(torch.cat(depths), torch.cat(positions))

    @classmethod
    def all(cls, length: int, num_depths: int) -> ParallelRows:
        """Every row of a text of T ids."""
        return cls.drawn(length, num_depths, 1.0, 1.0, torch.Generator())

    def visible(self) -> torch.Tensor:
        """Whether the row [N] sees the row [N], bool."""
        depth, position = self.depths[:, None], self.positions[:, None]
        other_depth, other_position = self.depths[None], self.positions[None]
        is_text = (other_depth == 0) & (other_position <= position - depth)
        is_chain = (other_depth > 0) & (other_depth <= depth) & (position - other_position == depth - other_depth)
        return is_text | is_chain

    def ids(self, text: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """Input ids [B, N] for texts [B, T]."""
        return torch.where(self.depths > 0, mask_token_id, text[:, self.positions])

    def to(self, device: torch.device) -> ParallelRows:
        return ParallelRows(self.depths.to(device), self.positions.to(device))


def parallel_logits(model: object, text: torch.Tensor, rows: ParallelRows, mask_token_id: int) -> torch.Tensor:
    """Logits [B, N, V] in one forward over all rows of texts [B, T].

    `model`: a causal model of transformers whose attention is sdpa.
    """
    output = model(  # type: ignore[operator]
        input_ids=rows.ids(text, mask_token_id),
        position_ids=rows.positions[None].expand(len(text), -1),
        attention_mask=rows.visible()[None, None].expand(len(text), 1, -1, -1),
        use_cache=False,
    )
    logits: torch.Tensor = output.logits
    return logits
