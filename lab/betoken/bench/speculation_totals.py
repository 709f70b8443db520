"""Results of speculation over many answers: ratios of sums over their statistics, rounded for reports."""

from collections.abc import Sequence
from statistics import mean

from betoken.client import SpeculationStats


def block_efficiency(stats: Sequence[SpeculationStats]) -> float:
    """Emitted tokens per verify forward, prefill excluded."""
    num_forwards = sum(s.num_verify_forwards for s in stats)
    return round(sum(s.num_emitted_tokens for s in stats) / max(1, num_forwards), 3)


def acceptance_rate(stats: Sequence[SpeculationStats]) -> float:
    """Accepted over drafted tokens; of a tree every node counts as drafted."""
    num_drafted = sum(s.num_draft_tokens for s in stats)
    return round(sum(s.num_accepted_tokens for s in stats) / max(1, num_drafted), 3)


def predicted_speedup(stats: Sequence[SpeculationStats]) -> float | None:
    """Speed over the speed without speculation as the router's policy expected it, a mean; None if it never did."""
    expected = [s.policy.expected_speedup for s in stats if s.policy is not None and s.policy.expected_speedup]
    return round(mean(expected), 3) if expected else None


def draft_forwards_per_round(stats: Sequence[SpeculationStats]) -> float:
    """Forwards of the drafter's models per round, prefill excluded."""
    num_rounds = sum(s.num_rounds for s in stats)
    return round(sum(s.num_draft_forwards for s in stats) / max(1, num_rounds), 3)


def round_times(stats: Sequence[SpeculationStats]) -> dict[str, float]:
    """Parts of the mean round, milliseconds; the two verify figures are per target forward."""
    num_rounds = max(1, sum(s.num_rounds for s in stats))
    num_forwards = max(1, sum(s.num_verify_forwards for s in stats))
    seconds = {
        "whole": sum(s.round_s for s in stats) / num_rounds,
        "draft_queue": sum(s.draft_queue_s for s in stats) / num_rounds,
        "draft_forward": sum(s.draft_forward_s for s in stats) / num_rounds,
        "verify_queue": sum(s.verify_queue_s for s in stats) / num_forwards,
        "verify_forward": sum(s.verify_forward_s for s in stats) / num_forwards,
    }
    return {name: round(1000 * value, 3) for name, value in seconds.items()}


def drafting_ms(stats: Sequence[SpeculationStats]) -> float | None:
    """The drafter's own time in the mean round, its queue excluded and so the first round, in which it takes in the
    prompt; None without further rounds.
    """
    num_rounds = sum(max(0, s.num_rounds - 1) for s in stats)
    seconds = sum(s.draft_forward_s - s.first_draft_forward_s for s in stats)
    return round(1000 * seconds / num_rounds, 3) if num_rounds else None


def first_drafting_ms(stats: Sequence[SpeculationStats]) -> float | None:
    """The drafter's own time in the mean first round; None without rounds."""
    seconds = [s.first_draft_forward_s for s in stats if s.num_rounds]
    return round(1000 * sum(seconds) / len(seconds), 3) if seconds else None
