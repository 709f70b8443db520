"""Heads by which the tokens of a block depend on each other: DSpark's Markov and confidence heads, DFlash 2's selector.

The tokens of a block are chosen from left to right; a head corrects the scores of a position by the token before it.
Source: DSpark, arXiv:2607.05147; z-lab's DFlash 2; written from their definitions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from betoken.drafters.dflash.shape import BlockShape


class FollowingHead(Protocol):
    """Corrects the scores of positions by the tokens before them."""

    def begin(self, num: int, like: Tensor) -> Tensor:
        """State [num, ...] of blocks without a token, in the type and on the device of `like`."""
        ...

    def correct(self, scores: Tensor, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Correct one position of each of N blocks.

        Args:
            scores: [N, V] float32.
            hidden: [N, H], which the output layer reads.
            previous: [N] int64 tokens before the positions.
            state: [N, ...] after the positions before.
        Returns:
            Scores [N, V] float32, -inf for tokens that cannot be chosen, and the state.
        """
        ...


class MarkovHead(nn.Module):
    """Adds a bias of low rank for the previous token: plain, gated by the position, or with a recurrent state."""

    def __init__(self, shape: BlockShape, vocab_size: int, num_ids: int) -> None:
        super().__init__()
        rank, size = shape.markov_rank, shape.hidden_size
        self._rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_ids, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if shape.markov_head_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if shape.markov_head_type == "rnn" else None

    def begin(self, num: int, like: Tensor) -> Tensor:
        """See `FollowingHead`."""
        return like.new_zeros(num, self._rank)

    def correct(self, scores: Tensor, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `FollowingHead`."""
        latent = self.markov_w1(previous)
        if self.gate_proj is not None:
            latent = torch.sigmoid(self.gate_proj(torch.cat((hidden, latent), dim=-1))) * latent
        elif self.joint_proj is not None:
            gate, candidate, output = self.joint_proj(torch.cat((state, latent, hidden), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1.0 - gate) * torch.tanh(candidate)
            latent = torch.tanh(output)
        return scores + self.markov_w2(latent.contiguous()).float(), state


class ConfidenceHead(nn.Module):
    """Probability that a position's token is accepted if those before it are."""

    def __init__(self, shape: BlockShape, has_bias: bool) -> None:
        super().__init__()
        self.reads_markov = shape.confidence_reads_markov
        self.proj = nn.Linear(shape.hidden_size + shape.markov_rank * self.reads_markov, 1, bias=has_bias)

    def forward(self, hidden: Tensor, latent: Tensor | None) -> Tensor:
        """Hidden [N, H] and embeddings of the tokens before [N, r] -> [N] float32."""
        features = hidden if latent is None else torch.cat((hidden, latent), dim=-1)
        return torch.sigmoid(self.proj(features).float())[:, 0]


class CandidateSelector(nn.Module):
    """Scores the likeliest tokens of a position by how they go with the token before it."""

    def __init__(self, shape: BlockShape, vocab_size: int) -> None:
        super().__init__()
        self._top_k = shape.selector_top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, shape.selector_rank)
        self.successor_codebook = nn.Embedding(vocab_size, shape.selector_rank)
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)

    def begin(self, num: int, like: Tensor) -> Tensor:
        """See `FollowingHead`."""
        return like.new_zeros(num, 0)

    def correct(self, scores: Tensor, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `FollowingHead`."""
        best, ids = scores.topk(min(self._top_k, scores.shape[-1]), dim=-1)
        query = self.predecessor_codebook(previous) * self.hidden_projection(hidden)
        fits = (query[:, None].float() * self.successor_codebook(ids).float()).sum(-1)
        return torch.full_like(scores, -torch.inf).scatter(1, ids, best + fits), state
