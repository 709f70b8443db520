"""Formulas for the speed of speculative decoding: tokens and time of a round, and the costs at which it is slower.

All times are in decode steps of the target at the present batch, so that a speed-up of 1 is decoding without
speculation. Pure functions of numbers; `plan` applies them to milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Times of the parts of a round, decode steps of the target."""

    draft: float
    """One forward of the drafter: the ratio c of Leviathan et al., arXiv:2211.17192, section 3.3."""
    verify: float = 1.0
    """Verify forward of K + 1 tokens a sequence: the ratio beta."""
    verify_hop: float = 0.0
    """Round trip from the router to the verify worker."""
    draft_hop: float = 0.0
    """Round trip from the router to the draft worker."""
    is_parallel: bool = False
    """Whether one forward drafts all tokens of a round (PARD, arXiv:2504.18583)."""

    def drafting(self, num_tokens: int) -> float:
        """Return the time of drafting `num_tokens` tokens: c per token, or c in all if the drafter is parallel."""
        return self.draft * (min(1, num_tokens) if self.is_parallel else num_tokens)

    def drafting_ahead(self, num_tokens: int) -> float:
        """Return the time of drafting `num_tokens` tokens for every expected outcome: a forward ranks the outcomes, the
        others draft, and a parallel drafter takes one for that."""
        return self.draft + self.drafting(num_tokens)


def expected_block_length(acceptance: float, num_draft_tokens: int) -> float:
    """Return tau = (1 - a^(K+1)) / (1 - a), the expected tokens of a round: the accepted ones and the target's own.

    `acceptance` is the probability that a draft token is accepted if all before it are, the same at each position.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, equation 1.
    """
    if acceptance == 1.0:
        return num_draft_tokens + 1.0
    return (1.0 - acceptance ** (num_draft_tokens + 1)) / (1.0 - acceptance)


def synchronous_round_time(num_draft_tokens: int, costs: RoundCosts) -> float:
    """Return beta + c K + r_v + r_d, the time of a round whose draft is made before its verification begins.

    Source: the denominator of Leviathan et al., arXiv:2211.17192, theorem 3.8 (beta = 1 and no hops there).
    """
    return costs.verify + costs.drafting(num_draft_tokens) + costs.verify_hop + costs.draft_hop


def overlapped_round_time(num_draft_tokens: int, costs: RoundCosts, hit_rate: float) -> float:
    """Return r_v + h max(beta, c (K + 1)) + (1 - h) (beta + c K + r_d), the expected time of an overlapped round.

    While the target verifies, the drafter drafts after the expected outcomes. A hit (probability h) takes the longer of
    both, a miss the time of a synchronous round. A parallel drafter takes c instead of c K.

    Source: Kumar, Dao and May, "Speculative Speculative Decoding", arXiv:2603.03251, expected speed-up over decoding
    without speculation, with equal drafts after hits and misses; beta and the hops are additions.
    """
    hit = max(costs.verify, costs.drafting_ahead(num_draft_tokens))
    miss = costs.verify + costs.drafting(num_draft_tokens) + costs.draft_hop
    return costs.verify_hop + hit_rate * hit + (1.0 - hit_rate) * miss


def synchronous_speedup(acceptance: float, num_draft_tokens: int, costs: RoundCosts) -> float:
    """Return tau / (beta + c K + r_v + r_d), the speed of synchronous rounds over decoding without speculation.

    Source: Leviathan et al., arXiv:2211.17192, theorem 3.8, extended by beta and the hops.
    """
    return expected_block_length(acceptance, num_draft_tokens) / synchronous_round_time(num_draft_tokens, costs)


def overlapped_speedup(acceptance: float, num_draft_tokens: int, costs: RoundCosts, hit_rate: float) -> float:
    """Return the speed of overlapped rounds over decoding without speculation.

    Source: the sources of `expected_block_length` and `overlapped_round_time`, whose quotient it is.
    """
    time = overlapped_round_time(num_draft_tokens, costs, hit_rate)
    return expected_block_length(acceptance, num_draft_tokens) / time


def break_even(time_of: Callable[[float], float], corner: float, block_length: float) -> float:
    """Return the largest cost x >= 0 at which a round of time `time_of(x)` takes no longer than its tokens would take
    without speculation; 0 if it always takes longer.

    Args:
        time_of: increasing, and linear on both sides of `corner`.
        block_length: expected tokens of the round, so its time without speculation, decode steps.

    Source: speed-up = 1; for synchronous rounds of one token, c = a as in Leviathan et al., arXiv:2211.17192,
    corollary 3.9.
    """
    least, middle, beyond = time_of(0.0), time_of(corner), time_of(corner + 1.0)
    if block_length < least:
        return 0.0
    if block_length >= middle:
        return corner + (block_length - middle) / (beyond - middle)
    return corner * (block_length - least) / (middle - least)


def distinct_experts(num_experts: int, num_active: int, num_tokens: int) -> float:
    """Return E (1 - ((E - k) / E)^T), the expected experts of a layer that a forward of T tokens reads.

    Each token selects `num_active` of `num_experts` independently of the others and evenly; real routing is less even,
    so fewer are read.

    Source: Huang et al., "MoESD: Unveil Speculative Decoding's Potential for Accelerating Sparse MoE",
    arXiv:2505.19645, expected number of activated experts N(t).
    """
    return num_experts * (1.0 - ((num_experts - num_active) / num_experts) ** num_tokens)
