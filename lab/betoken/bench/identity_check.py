"""Whether two answers to one prompt count as identical, and the running count.

Plain equality between our own runs; the near-tie rule against `transformers`.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from betoken.bench.baseline import Baseline, BaselineRun
from betoken.bench.near_tie import first_difference, is_near_tie, max_near_ties
from betoken.bench.prompts import Prompt
from betoken.bench.streams import top_two_gap
from betoken.client import AsyncClient, Completion


class Outcome(StrEnum):
    """The result of a comparison."""

    IDENTICAL = "identical"
    NEAR_TIE = "near-tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison; `detail` is empty when identical."""

    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class IdentityCount:
    """Comparisons so far; `near_ties` are not counted as identical."""

    compared: int = 0
    identical: int = 0
    near_ties: int = 0
    compared_with_transformers: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, comparison: Comparison, with_transformers: bool = False) -> None:
        """Count one comparison."""
        self.compared += 1
        self.compared_with_transformers += with_transformers
        self.identical += comparison.outcome is Outcome.IDENTICAL
        self.near_ties += comparison.outcome is Outcome.NEAR_TIE
        if comparison.detail:
            self.differences.append(comparison.detail)

    @property
    def failed(self) -> int:
        """Comparisons that are neither identical nor excused."""
        return self.compared - self.identical - self.near_ties

    @property
    def holds(self) -> bool:
        """Whether all are identical but for as many near-ties as the rule allows."""
        return self.failed == 0 and self.near_ties <= max_near_ties(self.compared_with_transformers)


def compare_equal(prompt: Prompt, completion: Completion, reference: Completion) -> Comparison:
    """Equality of two of our answers."""
    return compare_ids(prompt, completion.output_ids, reference.output_ids)


def compare_ids(prompt: Prompt, ids: tuple[int, ...], reference_ids: tuple[int, ...]) -> Comparison:
    """Plain equality of output ids."""
    position = first_difference(ids, reference_ids)
    if position is None:
        return Comparison(Outcome.IDENTICAL)
    here = f"{_at(ids, position)} instead of {_at(reference_ids, position)}"
    return Comparison(Outcome.DIFFERENT, f"prompt {prompt.index}: differs at output position {position}: {here}")


async def compare_with_transformers(
    prompt: Prompt,
    completion: Completion,
    run: BaselineRun,
    client: AsyncClient,
    baseline: Baseline,
    ignore_eos: bool = False,
) -> Comparison:
    """The near-tie rule; the two gaps are computed only if the ids differ. `ignore_eos` as on both sides."""
    if list(completion.prompt_ids) != run.prompt_ids:
        return Comparison(Outcome.DIFFERENT, f"prompt {prompt.index}: tokenized differently from transformers")
    comparison = compare_ids(prompt, completion.output_ids, tuple(run.ids))
    position = first_difference(completion.output_ids, run.ids)
    if position is None:
        return comparison
    if position >= min(len(completion.output_ids), len(run.ids)):
        return comparison
    gap = await top_two_gap(client, prompt.text, position, ignore_eos)
    reference_gap = await asyncio.to_thread(baseline.gap, prompt.text, position)
    outcome = Outcome.NEAR_TIE if is_near_tie(gap, reference_gap) else Outcome.DIFFERENT
    detail = f"{comparison.detail}; top-2 gap {gap:.2e}, in transformers {reference_gap:.2e}: {outcome}"
    return Comparison(outcome, detail)


def _at(ids: tuple[int, ...], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "the end"
