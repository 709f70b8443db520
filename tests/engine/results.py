"""Random verification results on a runner's own sequence."""

import random
from collections.abc import Sequence
from typing import Any

from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.tree import KeptPath
from betoken.testing.random_results import live_through_results


def decide(runner: ModelRunner, rng: random.Random, ids: list[int], pages: Any) -> int:
    """Run and extend `ids` in these pages; return the number stored there afterwards."""

    def forward(length: int, block: Sequence[int], parents: Sequence[int] | None) -> None:
        num_rows = 0 if parents is None else len(parents) + 1
        runner.forward([Segment(pages, length, list(block), num_rows, parents)])

    def keep(length: int, path: Sequence[int]) -> None:
        runner.compact([KeptPath(pages, length, list(path))])

    return live_through_results(rng, ids, forward, keep)
