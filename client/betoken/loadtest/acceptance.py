"""Acceptance of drafts as servers report it: per response, or as counters of `/metrics` before and after a run.

Sources: vLLM's `metrics.speculative_decoding` and `vllm:spec_decode_num_*`, which our gateway has, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(\{[^}]*\})? (\S+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of verified drafts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = field(default=())
    """Drafts that reached position i; each draft if the server does not report lengths."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification, the target's own included; 1 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def by_position(self) -> list[float]:
        """Accepted at position i over drafts that reached it."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=False)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    def __add__(self, other: Acceptance) -> Acceptance:
        return _combined(self, other, 1)

    def __sub__(self, other: Acceptance) -> Acceptance:
        return _combined(self, other, -1)

    def as_json(self) -> dict[str, Any]:
        """Counts and rates."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.rate,
            "by_position": self.by_position,
        }


def _combined(one: Acceptance, other: Acceptance, sign: int) -> Acceptance:
    def lists(name: str) -> tuple[int, ...]:
        pairs = zip_longest(getattr(one, name), getattr(other, name), fillvalue=0)
        return tuple(left + sign * right for left, right in pairs)

    return Acceptance(
        one.num_drafts + sign * other.num_drafts,
        one.num_draft_tokens + sign * other.num_draft_tokens,
        one.num_accepted_tokens + sign * other.num_accepted_tokens,
        lists("accepted_per_position"),
        lists("drafted_per_position"),
    )


def of_event(event: Mapping[str, Any]) -> Acceptance | None:
    """Return the acceptance that a response or its last event reports in vLLM's format; None if it reports none."""
    try:
        told = event["metrics"]["speculative_decoding"]
        histogram, num_drafts = list(map(int, told["acceptance_histogram"])), int(told["num_spec_steps"])
        by_length = {
            int(length): sum(map(int, counts))
            for length, counts in told.get("acceptance_histogram_by_draft_length", {}).items()
        }
        draft_tokens, accepted = int(told["num_draft_tokens"]), int(told["num_accepted_draft_tokens"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    positions = range(1, len(histogram))
    reached = [sum(n for length, n in by_length.items() if length >= i) if by_length else num_drafts for i in positions]
    kept = [sum(histogram[i:]) for i in positions]
    return Acceptance(num_drafts, draft_tokens, accepted, tuple(kept), tuple(reached))


def of_metrics(text: str) -> Acceptance | None:
    """Return the counters of a page of Prometheus metrics, summed over engines; None if it has none."""
    counts: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        number = int(float(value))
        position = _POSITION.search(labels)
        if name == "accepted_tokens_per_pos" and position is not None:
            positions[int(position[1])] = positions.get(int(position[1]), 0) + number
        else:
            counts[name] = counts.get(name, 0) + number
    if "drafts" not in counts:
        return None
    num_positions = max(positions, default=-1) + 1
    return Acceptance(
        counts["drafts"],
        counts.get("draft_tokens", 0),
        counts.get("accepted_tokens", 0),
        tuple(positions.get(position, 0) for position in range(num_positions)),
        (counts["drafts"],) * num_positions,
    )


def total(parts: Iterable[Acceptance | None]) -> Acceptance | None:
    """Return the sum of the known parts; None without any."""
    known = [part for part in parts if part is not None]
    return sum(known[1:], known[0]) if known else None
