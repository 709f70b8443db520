"""When two token sequences count as the same, and when a difference is excused as a near-tie.

A near-tie: at the first differing position both runs see their two best logits less than 1e-4 apart. The rule is for
float32 against `transformers` alone; our own runs must be equal.
"""

from collections.abc import Sequence

MAX_GAP = 1e-4
MAX_NEAR_TIE_SHARE = 2 / 164


def first_difference(ids: Sequence[int], reference_ids: Sequence[int]) -> int | None:
    """Index of the first position at which the sequences differ (one may have ended there), None when equal."""
    for position, (left, right) in enumerate(zip(ids, reference_ids, strict=False)):
        if left != right:
            return position
    return None if len(ids) == len(reference_ids) else min(len(ids), len(reference_ids))


def is_near_tie(gap: float, reference_gap: float) -> bool:
    """Whether the top-2 gaps of both runs at the first differing position excuse the difference."""
    return gap < MAX_GAP and reference_gap < MAX_GAP


def max_near_ties(num_prompts: int) -> int:
    """Number of near-ties that are excused among `num_prompts`: two of 164, in proportion for fewer, at least
    one."""
    return max(1, int(num_prompts * MAX_NEAR_TIE_SHARE))
