"""How long a forward takes: the table that lets a draft length be chosen, not configured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.state_table import PageList

_NUM_WARM_UP = 2
_NUM_TIMED = 7


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median time of a forward of `rows` new tokens of one sequence after `context` tokens, all rows with logits."""

    rows: int
    context: int
    ns: int


def measure_step_costs(
    runner: ModelRunner, rows: Sequence[int] | None = None, contexts: Sequence[int] | None = None
) -> list[StepCost]:
    """One entry per pair that fits the model's context, the batch and the free pages; leaves the page table as it was.

    Without `rows` for the forward's own choice. Without `contexts` after 512 tokens, or as many as there is room for
    beside the most rows.
    """
    rows = rows or runner.timed_rows
    if contexts is None:
        contexts = (max(0, min(512, runner.info.max_context - max(rows))),)
    costs = []
    for context in contexts:
        for num_rows in rows:
            length = context + num_rows
            if length > runner.info.max_context or num_rows > runner.max_batch_rows:
                continue
            if not runner.page_table.can_extend(PageList(), length):
                continue
            page_ids, _ = runner.page_table.allocate(range(length))
            if page_ids.state is not None:
                page_ids.state.num_applied = context
            try:
                costs.append(StepCost(num_rows, context, _time_forward(runner, page_ids, context, num_rows)))
            finally:
                runner.page_table.release(page_ids)
    return costs


def _time_forward(runner: ModelRunner, page_ids: PageList, context: int, num_rows: int) -> int:
    ids = [index % runner.info.vocab_size for index in range(num_rows)]
    segment = Segment(page_ids, context, ids, num_rows, num_committed=context)
    durations = []
    for _ in range(_NUM_WARM_UP + _NUM_TIMED):
        start = time.perf_counter_ns()
        logits = runner.forward([segment]).logits
        logits[0, 0].item()  # waits for the device
        durations.append(time.perf_counter_ns() - start)
    return int(median(durations[_NUM_WARM_UP:]))
