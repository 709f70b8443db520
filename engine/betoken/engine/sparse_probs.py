"""The distribution that a draft token was sampled from, as plain numbers, for code that does without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """The distribution of one draft token: unique ids, at most 64, and their float32 probabilities, above 0."""

    token_ids: list[int]
    probs: list[float]
