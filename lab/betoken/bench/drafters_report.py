"""The drafter table: medians, ratios and paired verdicts per prompts file and category, as Markdown and as JSON.

Works on what the store holds; measures nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from betoken.bench.baseline import BASELINE_NAMES
from betoken.bench.drafters_store import DraftersStore, PromptRun
from betoken.bench.identity_check import IdentityCount
from betoken.bench.matrix import FUSED, NO_DRAFTER
from betoken.bench.paired_ratio import PairedRatio, best_by_median, estimate
from betoken.bench.sides import parse_side
from betoken.bench.speculation_totals import (
    acceptance_rate,
    block_efficiency,
    draft_forwards_per_round,
    drafting_ms,
    first_drafting_ms,
    predicted_speedup,
    round_times,
)

ALL = "all"
"""Name of the row for a whole file of several categories."""
TOO_LONG = "left out: longer than the context"
_COLUMNS = {
    "drafter": "",
    "tokens/s": "tokens_per_s",
    "x plain": "ratio_to_plain",
    "predicted": "predicted",
    "block efficiency": "block_efficiency",
    "acceptance": "acceptance_rate",
    "draft forwards a round": "draft_forwards_per_round",
    "drafting, ms a round": "drafting_ms",
    "first round, ms": "first_drafting_ms",
    "waiting, ms a round": "waiting_ms",
}
"""Heading to a side's figure."""
_ONE_DIGIT = ("tokens_per_s", "first_drafting_ms")


def summarize(store: DraftersStore) -> dict[str, Any]:
    """The JSON object; speeds only where every sequence was identical."""
    runs = list(store.done.values())
    identity = total_identity(runs)
    result: dict[str, Any] = {
        "options": store.manifest,
        "num_prompts": len({(run.task.prompts, run.task.index) for run in runs}),
        "repeats": 1 + max((run.task.repeat for run in runs), default=0),
        "identical": identity.identical,
        "compared": identity.compared,
        "near_ties": identity.near_ties,
        "commits": sorted({run.commit for run in runs}),
        "most_load_average": max((run.load_average for run in runs), default=None),
        "transformers_num_threads": {BASELINE_NAMES[m]: n for m, n in store.num_threads.items()},
        **(store.sessions[-1] if store.sessions else {}),
    }
    if identity.holds:
        left_out = store.left_out
        result["groups"] = [
            _group(prompts, category, members, store.manifest["drafters"])
            | {"num_left_out": sum(e.count for e in left_out if e.prompts == prompts and category in (e.category, ALL))}
            for (prompts, category), members in _groups(runs)
        ]
        measured = {(run.task.prompts, run.category) for run in runs}
        absent = [entry for entry in left_out if entry.count and (entry.prompts, entry.category) not in measured]
        result["left_out"] = [asdict(entry) for entry in absent]
    return result


def total_identity(runs: Sequence[PromptRun]) -> IdentityCount:
    """The counts of all prompts together; each difference includes its place."""
    total = IdentityCount()
    for run in runs:
        total.compared += run.identity.compared
        total.identical += run.identity.identical
        total.near_ties += run.identity.near_ties
        total.compared_with_transformers += run.identity.compared_with_transformers
        total.differences += [f"{run.task.prompts}, {difference}" for difference in run.identity.differences]
    return total


def markdown(group: Mapping[str, Any]) -> str:
    """One group's heading, table and verdict."""
    left_out = f", {group['num_left_out']} {TOO_LONG}" if group["num_left_out"] else ""
    heading = f"**{group['prompts']}, {group['category']}** ({group['num_prompts']} prompts{left_out})"
    figures = list(_COLUMNS.values())[1:]
    rows = [[_label(side["side"]), *(_figure(side, name) for name in figures)] for side in group["sides"]]
    lines = ["| " + " | ".join(cells) + " |" for cells in [list(_COLUMNS), *rows]]
    lines.insert(1, "|---" * len(_COLUMNS) + "|")
    parts = ["\n".join([heading, "", *lines])]
    for side in group["sides"]:
        if side.get("num_failed_drafts"):
            parts.append(f"{_label(side['side'])}: {side['num_failed_drafts']} drafts were late or failed")
    fused = group.get("fused_to_best")
    if fused:
        parts.append(
            f"`{FUSED}` to the best single drafter, `{fused['best']}`: {fused['ratio']:.3f} "
            f"[{fused['low']:.3f}, {fused['high']:.3f}] over {fused['num_pairs']} pairs: {fused['verdict']}"
        )
    return "\n\n".join(parts)


def _groups(runs: Sequence[PromptRun]) -> Iterator[tuple[tuple[str, str], list[PromptRun]]]:
    """By file and category, in the order they were first measured; a file of several categories also as a whole."""
    files: dict[str, dict[str, list[PromptRun]]] = {}
    for run in runs:
        files.setdefault(run.task.prompts, {}).setdefault(run.category, []).append(run)
    for prompts, categories in files.items():
        for category, members in categories.items():
            yield (prompts, category), members
        if len(categories) > 1:
            yield (prompts, ALL), [run for members in categories.values() for run in members]


def _group(prompts: str, category: str, runs: Sequence[PromptRun], drafters: Sequence[str]) -> dict[str, Any]:
    names = [name for name in _order(drafters) if name in runs[0].runs]
    group: dict[str, Any] = {
        "prompts": prompts,
        "category": category,
        "num_prompts": len({run.task.index for run in runs}),
        "num_tokens": sum(run.runs[NO_DRAFTER].num_tokens for run in runs),
        "sides": [_side(name, runs) for name in names],
    }
    singles = [name for name in names if is_single_drafter(name)]
    if category != ALL and singles and FUSED in names:
        best = best_by_median({name: _speeds(name, runs) for name in singles})
        group["fused_to_best"] = {"best": best, **_ratio_json(estimate(ratios_per_prompt(runs, FUSED, best)))}
    return group


def ratios_per_prompt(runs: Sequence[PromptRun], side: str, reference: str) -> list[float]:
    """Ratio of two sides' speeds, one number per prompt. It is the median over the passes, whose noise is not
    independent evidence.
    """
    ratios: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        ratio = run.runs[side].tokens_per_s / run.runs[reference].tokens_per_s
        ratios.setdefault((run.task.prompts, run.task.index), []).append(ratio)
    return [median(of_prompt) for of_prompt in ratios.values()]


def is_single_drafter(name: str) -> bool:
    """Whether a side has a drafter other than `fused`."""
    return name not in BASELINE_NAMES.values() and parse_side(name).drafter not in (NO_DRAFTER, FUSED)


def _side(name: str, runs: Sequence[PromptRun]) -> dict[str, Any]:
    side: dict[str, Any] = {
        "side": name,
        "tokens_per_s": round(median(_speeds(name, runs)), 1),
        "ratio_to_plain": round(median(ratios_per_prompt(runs, name, NO_DRAFTER)), 3),
    }
    stats = [speculation for run in runs if (speculation := run.runs[name].speculation) is not None]
    if stats:
        side |= {
            "predicted": predicted_speedup(stats),
            "block_efficiency": block_efficiency(stats),
            "acceptance_rate": acceptance_rate(stats),
            "draft_forwards_per_round": draft_forwards_per_round(stats),
            "drafting_ms": drafting_ms(stats),
            "first_drafting_ms": first_drafting_ms(stats),
            "waiting_ms": round_times(stats)["draft_queue"],
            "num_rounds": sum(s.num_rounds for s in stats),
            "num_failed_drafts": sum(s.num_failed_drafts for s in stats),
        }
    return side


def _speeds(name: str, runs: Sequence[PromptRun]) -> list[float]:
    return [run.runs[name].tokens_per_s for run in runs]


def _order(drafters: Sequence[str]) -> list[str]:
    """Plain decoding, single drafters as they were named, `fused`, `transformers`."""
    return [NO_DRAFTER, *sorted(drafters, key=lambda name: not is_single_drafter(name)), *BASELINE_NAMES.values()]


def _ratio_json(found: PairedRatio) -> dict[str, Any]:
    figures = {"ratio": round(found.ratio, 4), "low": round(found.low, 4), "high": round(found.high, 4)}
    return {**figures, "num_pairs": found.num_pairs, "verdict": str(found.verdict)}


def _label(side: str) -> str:
    if side == NO_DRAFTER:
        return "none (plain decoding)"
    return side.replace("_", " ") if side in BASELINE_NAMES.values() else f"`{side}`"


def _figure(side: Mapping[str, Any], name: str) -> str:
    value = side.get(name)
    return "" if value is None else f"{value:.{1 if name in _ONE_DIGIT else 2}f}"
