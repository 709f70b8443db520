"""`metrics.speculative_decoding` of a response: the acceptance of one request, in vLLM's format.

Load generators read it from the body of a response, or from the last event of a stream, the one with the usage.
Source: vLLM, docs/features/speculative_decoding/acceptance_metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from betoken.client import Completion

Level: TypeAlias = Literal["none", "summary", "detailed"]


def response_metrics(answers: Sequence[Completion], level: Level) -> dict[str, Any]:
    """Return the response's field `metrics`; no field at the level `none`.

    `speculative_decoding` is null for several answers, and without a drafter.
    """
    if level == "none":
        return {}
    is_single = len(answers) == 1 and bool(answers[0].drafter)
    return {"metrics": {"speculative_decoding": acceptance(answers[0], level) if is_single else None}}


def acceptance(answer: Completion, level: Level) -> dict[str, Any]:
    """Return the acceptance of an answer.

    `num_spec_tokens` is the longest verified draft, because draft lengths adapt. The length of a tree is its depth, so
    its other branches count in `num_draft_tokens` alone. Of a resumed answer, the last stream's drafts are counted.
    """
    stats = answer.speculation
    longest = max((one.length for one in stats.draft_outcomes), default=0)
    histogram = [0] * (longest + 1)
    for outcomes in stats.draft_outcomes:
        for num_accepted, num_drafts in enumerate(outcomes.num_drafts_by_accepted):
            histogram[num_accepted] += num_drafts
    by_length = {str(one.length): list(one.num_drafts_by_accepted) for one in stats.draft_outcomes}
    fields: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + stats.accepted_per_round,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": longest,
    }
    return fields | _per_step(answer) if level == "detailed" else fields


def _per_step(answer: Completion) -> dict[str, Any]:
    """Numbers of each round with a draft, in order; absent for a resumed answer, whose earlier drafts are uncounted."""
    rounds = [times for times in answer.rounds if times.num_draft_tokens]
    if len(rounds) != answer.speculation.num_drafts:
        return {}
    return {
        "per_step_accepted": [times.num_accepted_tokens for times in rounds],
        "per_step_drafted": [times.num_draft_tokens for times in rounds],
    }
