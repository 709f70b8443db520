"""The values of a plan as measured with running workers, and its prediction next to the measured speed.

Knows answers; asks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from betoken.client import Completion, InvalidArgumentError, SpeculationStats, StepCost
from betoken.common.economy import speedup
from betoken.common.economy.plan import DraftKind, PlanInputs


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured values and speeds of one draft length."""

    num_draft_tokens: int
    inputs: PlanInputs
    acceptance_by_position: tuple[float, ...]
    verify_ratio: float
    """Verify forward over decode step."""
    decode_tokens_per_s: float
    """One stream without speculation, as the router measured it."""
    tokens_per_s: float
    """The stream with drafts."""
    block_length: float
    """Tokens per round with a draft."""
    is_overlapped: bool
    """Whether rounds were overlapped, so that the hit rate is measured and not assumed."""

    @property
    def speedup(self) -> float:
        """Measured speed over decoding without speculation."""
        return self.tokens_per_s / self.decode_tokens_per_s

    @property
    def predicted_block_length(self) -> float:
        """Expected tokens per round at the measured acceptance."""
        return speedup.expected_block_length(self.inputs.acceptance, self.num_draft_tokens)

    @property
    def predicted_speedup(self) -> float:
        """Speed-up by the formula of the measured kind of rounds, with the measured costs."""
        costs = self.inputs.costs(self.num_draft_tokens)
        if self.is_overlapped:
            hit_rate = self.inputs.hit_rate
            return speedup.overlapped_speedup(self.inputs.acceptance, self.num_draft_tokens, costs, hit_rate)
        return speedup.synchronous_speedup(self.inputs.acceptance, self.num_draft_tokens, costs)

    def as_json(self) -> dict[str, Any]:
        """Everything, of JSON types only."""
        names = ("speedup", "predicted_speedup", "predicted_block_length")
        return asdict(self) | {name: getattr(self, name) for name in names}


def measured(
    decoded: Sequence[Completion],
    drafted: Sequence[Completion],
    num_draft_tokens: int,
    hit_rate: float,
    draft: DraftKind = DraftKind.SEQUENTIAL,
) -> Measured:
    """Return the values of a plan from answers without speculation and answers with drafts of a fixed length.

    `hit_rate` is assumed unless rounds were overlapped. A hit takes no drafting time and no round trip to the draft
    worker.

    Raises:
        InvalidArgumentError: the answers are too short for a decode step, or no draft was verified.
    """
    plain, stats = [one.speculation for one in decoded], [one.speculation for one in drafted]
    num_steps, num_drafts = _sum(plain, "num_verify_forwards"), _sum(stats, "num_drafts")
    if not num_steps or not _sum(stats, "num_verify_forwards") or min(map(_num_decoded, (*decoded, *drafted))) < 1:
        raise InvalidArgumentError("max_new_tokens", "", "must be enough for decode steps; answers ended too early")
    if not num_drafts:
        raise InvalidArgumentError("drafter", drafted[0].drafter, "must draft; no draft was verified")
    step_ms = 1e3 * _sum(plain, "verify_forward_s") / num_steps
    verify_ms = 1e3 * _sum(stats, "verify_forward_s") / _sum(stats, "num_verify_forwards")
    num_rounds = _sum(stats, "num_rounds")
    drafting_s = _sum(stats, "draft_forward_s") - _sum(stats, "first_draft_forward_s")  # without the prompts' prefill
    num_hits, num_misses = _sum(stats, "num_ahead_hits"), _sum(stats, "num_ahead_misses")
    is_overlapped = num_hits + num_misses > 0
    hit_rate = num_hits / (num_hits + num_misses) if is_overlapped else hit_rate
    drafting_ms = 1e3 * max(0.0, drafting_s) / max(1, num_rounds - num_hits - len(stats))
    per_forward = 1 if draft is DraftKind.PARALLEL else num_draft_tokens
    inputs = PlanInputs(
        target_step_ms=step_ms,
        draft_step_ms=drafting_ms / per_forward,
        acceptance=_acceptance(stats),
        rtt_ms=_hops_ms(stats) / (2 - hit_rate if is_overlapped else 2),
        hit_rate=hit_rate,
        token_ms=max(0.0, verify_ms - step_ms) / num_draft_tokens,
        draft=draft,
        max_draft_tokens=max(16, num_draft_tokens),
    )
    return Measured(
        num_draft_tokens,
        inputs,
        _by_position(stats),
        verify_ms / step_ms,
        _tokens_per_s(decoded),
        _tokens_per_s(drafted),
        1.0 + _sum(stats, "num_accepted_tokens") / num_drafts,
        is_overlapped,
    )


def shared_probability(rejection: Sequence[Completion]) -> tuple[float, float]:
    """Return 1 - TV of the distributions of drafter and target, a mean over positions, and its standard error.

    TV is their total variation distance. `rejection`: answers in the mode REJECTION with one draft token per round,
    which is accepted with the probability sum(min(target, draft)) = 1 - TV. The drafter reports its probabilities.
    Source: Leviathan et al., arXiv:2211.17192, corollary 3.6.

    Raises:
        InvalidArgumentError: no draft was verified.
    """
    stats = [one.speculation for one in rejection]
    if not (num_drafts := _sum(stats, "num_drafts")):
        raise InvalidArgumentError("drafter", rejection[0].drafter, "must draft; no draft was verified")
    share = _sum(stats, "num_accepted_tokens") / num_drafts
    return share, math.sqrt(share * (1.0 - share) / num_drafts)


def _acceptance(stats: Sequence[SpeculationStats]) -> float:
    """Return the maximum-likelihood estimate for equal positions: accepted over examined tokens.

    The first rejected token of a draft is examined, those after it are not.
    """
    num_accepted = _sum(stats, "num_accepted_tokens")
    num_rejections = sum(sum(one.num_drafts_by_accepted[:-1]) for told in stats for one in told.draft_outcomes)
    return num_accepted / (num_accepted + num_rejections) if num_accepted else 0.0


def _hops_ms(stats: Sequence[SpeculationStats]) -> float:
    """Return the time of a round in neither worker: both round trips and the router's own work."""
    return 1e3 * _sum(stats, "router_overhead_p50_s") / len(stats)


def _by_position(stats: Sequence[SpeculationStats]) -> tuple[float, ...]:
    longest = max(len(one.num_drafted_per_position) for one in stats)

    def sums(name: str) -> list[int]:
        lists = [getattr(one, name) for one in stats]
        return [sum(values[i] for values in lists if i < len(values)) for i in range(longest)]

    pairs = zip(sums("num_accepted_per_position"), sums("num_drafted_per_position"), strict=True)
    return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)


def table_ratio(costs: Sequence[StepCost], num_tokens: int) -> float | None:
    """Return the step time of `num_tokens` over the time of one token in a worker's table, at its shortest context.

    Between two entries it is interpolated linearly; None if the table does not reach so far.
    """
    context = min((cost.context for cost in costs), default=0)
    times = sorted((cost.rows, cost.time_s) for cost in costs if cost.context == context)
    for (low, low_s), (high, high_s) in zip(times, times[1:], strict=False):
        if times[0][0] == 1 and times[0][1] > 0 and low <= num_tokens <= high:
            return (low_s + (high_s - low_s) * (num_tokens - low) / (high - low)) / times[0][1]
    return None


def _tokens_per_s(answers: Sequence[Completion]) -> float:
    seconds = sum(answer.duration_s - answer.time_to_first_token_s for answer in answers)
    return sum(map(_num_decoded, answers)) / max(seconds, 1e-9)


def _num_decoded(answer: Completion) -> int:
    return answer.usage.output_tokens - 1


def _sum(stats: Sequence[SpeculationStats], name: str) -> float:
    return float(sum(getattr(one, name) for one in stats))
