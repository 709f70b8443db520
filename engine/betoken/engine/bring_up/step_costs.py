"""How long a forward takes: the table that lets a draft length be chosen, not configured."""

import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from betoken.engine.batch import Segment
from betoken.engine.bring_up.kept import KeptResult
from betoken.engine.runner import ModelRunner
from betoken.engine.state_table import PageList

_NUM_WARM_UP = 2
_NUM_TIMED = 7
_NUM_PROBES = 3
_USUAL_RATIO = 1.5
"""Step times on a shared machine differ by so much without a reason to measure again."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Least time of a forward of `rows` new tokens of one sequence after `context` tokens, all rows with logits."""

    rows: int
    context: int
    ns: int


def measure_step_costs(
    runner: ModelRunner, rows: Sequence[int] | None = None, contexts: Sequence[int] | None = None
) -> list[StepCost]:
    """One entry per pair that fits the model's context, the batch and the free pages; leaves the page table as it was.

    Without `rows` for the forward's own choice. Without `contexts` after 512 tokens, or the room left by
    the largest number of rows.
    """
    points = _points(runner, rows, contexts)
    least_ns = dict.fromkeys(points, sys.maxsize)
    for turn in range(_NUM_WARM_UP + _NUM_TIMED):  # in turn: what else runs here for a while slows all points alike
        for point in points:
            ns = _time_forward(runner, *point)
            if turn >= _NUM_WARM_UP:
                least_ns[point] = min(ns, least_ns[point])  # other work only ever adds to a time
    return [StepCost(*point, ns) for point, ns in least_ns.items()]


def kept_step_costs(runner: ModelRunner, kept: KeptResult) -> list[StepCost]:
    """As `measure_step_costs`, or as it measured at an earlier start unless a forward has become faster since. On a
    machine that is busier now, the earlier times are scaled to the present time of a forward."""
    costs = [StepCost(*cost) for cost in kept.read() or ()]
    points = _points(runner)
    if points and [(cost.rows, cost.context) for cost in costs] == points:
        ns = min(_time_forward(runner, *points[0]) for _ in range(_NUM_WARM_UP + _NUM_PROBES))
        ratio = ns / costs[0].ns
        if ratio > _USUAL_RATIO:
            return [replace(cost, ns=round(cost.ns * ratio)) for cost in costs]
        if ratio >= 1 / _USUAL_RATIO:
            return costs
    costs = measure_step_costs(runner)
    kept.write([astuple(cost) for cost in costs])
    return costs


def _points(
    runner: ModelRunner, rows: Sequence[int] | None = None, contexts: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Rows and contexts to time."""
    rows = rows or runner.timed_rows
    if contexts is None:
        contexts = (max(0, min(512, runner.info.max_context - max(rows))),)
    return [(num_rows, context) for context in contexts for num_rows in rows if _fits(runner, num_rows, context)]


def _fits(runner: ModelRunner, num_rows: int, context: int) -> bool:
    length = context + num_rows
    is_within = length <= runner.info.max_context and num_rows <= runner.max_num_batched_tokens
    return is_within and runner.page_table.can_extend(PageList(), length)


def _time_forward(runner: ModelRunner, num_rows: int, context: int) -> int:
    """Nanoseconds of one."""
    page_ids, _ = runner.page_table.allocate(range(context + num_rows))
    try:
        if page_ids.state is not None:
            page_ids.state.num_applied = context
        ids = [index % runner.info.vocab_size for index in range(num_rows)]
        segment = Segment(page_ids, context, ids, num_rows, num_committed=context)
        start = time.perf_counter_ns()
        logits = runner.forward([segment]).logits
        logits[0, 0].item()  # waits for the device
        return time.perf_counter_ns() - start
    finally:
        runner.page_table.release(page_ids)
