"""The plan of a deployment: speed-up and best draft length of synchronous and overlapped rounds, from measured times.

Applies the formulas of `speedup` to milliseconds and rejects values they are not defined for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from betoken.common.economy import speedup
from betoken.common.economy.speedup import RoundCosts
from betoken.common.errors import InvalidArgumentError

MAX_DRAFT_TOKENS = 512
"""Longest draft that is planned."""
MAX_TIME_MS = 1e9
MAX_COUNT = 1 << 20


class DraftKind(StrEnum):
    """Forwards of a drafter."""

    SEQUENTIAL = "sequential"
    """One forward per draft token."""
    PARALLEL = "parallel"
    """One forward for all tokens of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Measured or assumed values of a deployment.

    Raises:
        InvalidArgumentError: a value is outside its range; names field, value and limit.
    """

    target_step_ms: float
    """Decode step of the target with `batch` sequences, milliseconds."""
    draft_step_ms: float
    """Forward of the drafter, milliseconds."""
    acceptance: float
    """Probability that a draft token is accepted if all before it are."""
    batch: int = 1
    """Sequences per forward."""
    rtt_ms: float = 0.0
    """Round trip from the router to either worker, milliseconds."""
    hit_rate: float = 0.8
    """Share of overlapped rounds whose outcome was drafted in advance."""
    token_ms: float = 0.0
    """Time that one more token adds to a verify forward, milliseconds."""
    experts: int | None = None
    """Experts of a layer of a mixture-of-experts target; None for a dense one."""
    active: int | None = None
    """Experts that a token selects."""
    draft: DraftKind = DraftKind.SEQUENTIAL
    max_draft_tokens: int = 16
    """Longest draft to consider."""

    def __post_init__(self) -> None:
        self._check("target_step_ms", 1e-6, MAX_TIME_MS)
        for name in ("draft_step_ms", "rtt_ms", "token_ms"):
            self._check(name, 0, MAX_TIME_MS)
        for name in ("acceptance", "hit_rate"):
            self._check(name, 0, 1)
        self._check("batch", 1, MAX_COUNT)
        self._check("max_draft_tokens", 1, MAX_DRAFT_TOKENS)
        if (self.experts is None) != (self.active is None):
            field = "experts" if self.experts is None else "active"
            raise InvalidArgumentError(field, "absent", "must be given together, experts and active")
        if self.experts is not None:
            self._check("experts", 1, MAX_COUNT)
            self._check("active", 1, self.experts)

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not (isfinite(value) and low <= value <= high):
            raise InvalidArgumentError(name, value, f"must be {low:g} to {high:.10g}")

    @property
    def draft_ratio(self) -> float:
        """Forward of the drafter over decode step of the target: c."""
        return self.draft_step_ms / self.target_step_ms

    def experts_of(self, num_tokens: int) -> float | None:
        """Return the expected distinct experts per layer of a forward with `num_tokens` tokens a sequence."""
        if self.experts is None or self.active is None:
            return None
        return speedup.distinct_experts(self.experts, self.active, self.batch * num_tokens)

    def verify_ratio(self, num_draft_tokens: int) -> float:
        """Return beta, the verify forward of K draft tokens a sequence over the decode step.

        A mixture-of-experts target is taken to be bound by reading experts, so that beta is the ratio of distinct
        experts. `token_ms` adds its time per token.

        Source: target efficiency of MoESD, arXiv:2505.19645, whose inverse it is; the term per token is t' of
        docs/economy.md.
        """
        decode, verify = self.experts_of(1), self.experts_of(num_draft_tokens + 1)
        experts = verify / decode if decode and verify else 1.0
        return experts + self.batch * num_draft_tokens * self.token_ms / self.target_step_ms

    def costs(self, num_draft_tokens: int) -> RoundCosts:
        """Return the times of a round, decode steps."""
        hop = self.rtt_ms / self.target_step_ms
        beta = self.verify_ratio(num_draft_tokens)
        return RoundCosts(self.draft_ratio, beta, hop, hop, self.draft is DraftKind.PARALLEL)


@dataclass(frozen=True, slots=True)
class PlannedMode:
    """Expected speed of rounds of one draft length, and the costs at which they stop paying off."""

    speedup: float
    """Speed over decoding without speculation."""
    break_even_verify_ratio: float
    """Largest beta with a speed-up of 1 or more; 0 = there is none."""
    break_even_draft_ratio: float
    """Largest c with a speed-up of 1 or more; 0 = there is none."""


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """Expected speed with one draft length."""

    num_draft_tokens: int
    block_length: float
    """Expected tokens of a round: tau."""
    verify_ratio: float
    """Verify forward over decode step: beta."""
    verify_experts: float | None
    """Distinct experts per layer of the verify forward; None for a dense target."""
    synchronous: PlannedMode
    overlapped: PlannedMode


@dataclass(frozen=True, slots=True)
class Plan:
    """Expected speeds by draft length."""

    inputs: PlanInputs
    decode_experts: float | None
    """Distinct experts per layer of a decode step; None for a dense target."""
    rounds: tuple[PlannedRound, ...]
    """Draft lengths from 1."""

    @property
    def best_synchronous(self) -> PlannedRound:
        """The draft length with the fastest synchronous rounds; the shortest of equals."""
        return max(self.rounds, key=lambda planned: planned.synchronous.speedup)

    @property
    def best_overlapped(self) -> PlannedRound:
        """The draft length with the fastest overlapped rounds; the shortest of equals."""
        return max(self.rounds, key=lambda planned: planned.overlapped.speedup)

    def tokens_per_s(self, mode: PlannedMode | None = None) -> float:
        """Return tokens per second of the whole batch; without a mode, of decoding without speculation."""
        return (mode.speedup if mode else 1.0) * self.inputs.batch * 1e3 / self.inputs.target_step_ms


def plan(inputs: PlanInputs) -> Plan:
    """Return the expected speeds of all draft lengths from 1 to `max_draft_tokens`."""
    rounds = tuple(_planned(inputs, length) for length in range(1, inputs.max_draft_tokens + 1))
    return Plan(inputs, inputs.experts_of(1), rounds)


def _planned(inputs: PlanInputs, length: int) -> PlannedRound:
    costs = inputs.costs(length)
    block_length = speedup.expected_block_length(inputs.acceptance, length)

    def mode(time_of: Callable[[RoundCosts], float]) -> PlannedMode:
        corner = costs.drafting_ahead(length)  # drafting and verification of a hit take equally long
        unit = replace(costs, draft=1.0).drafting_ahead(length)
        return PlannedMode(
            block_length / time_of(costs),
            speedup.break_even(lambda beta: time_of(replace(costs, verify=beta)), corner, block_length),
            speedup.break_even(lambda c: time_of(replace(costs, draft=c)), costs.verify / unit, block_length),
        )

    return PlannedRound(
        length,
        block_length,
        costs.verify,
        inputs.experts_of(length + 1),
        synchronous=mode(lambda costs: speedup.synchronous_round_time(length, costs)),
        overlapped=mode(lambda costs: speedup.overlapped_round_time(length, costs, inputs.hit_rate)),
    )
