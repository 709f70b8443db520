"""State of a router's speculation policy, as answers and model information report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """Decision of the router whether requests of one kind speculate, and the reason."""

    drafter: str
    is_attached: bool
    """Whether the drafter is attached to the verify workers."""
    is_sampled: bool
    """Whether these requests have temperature > 0."""
    has_prediction: bool
    is_on: bool
    """Whether they speculate now."""
    expected_speedup: float
    """Expected speed with drafts over the speed without; 0 = not known yet."""
    reason: str
    """For example "off: expected 0.8 of decoding without speculation"."""
