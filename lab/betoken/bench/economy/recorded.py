"""A record of a machine and a pair of models: times of forwards and messages, and texts."""

import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from typing import Any

from betoken.engine.bring_up.step_costs import StepCost


class Table:
    """Milliseconds of a forward by its sequences and rows, between the recorded points along straight lines."""

    def __init__(self, points: Sequence[dict[str, float]]) -> None:
        self._lines: dict[int, list[tuple[float, float]]] = {}
        for point in points:
            seqs = int(point["seqs"])
            self._lines.setdefault(seqs, []).append((point["rows"] * seqs, point["ms"]))
        self._seqs = sorted(self._lines)
        for line in self._lines.values():
            line.sort()
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, num_seqs: int, num_rows: int) -> float:
        """Time of a forward over so many sequences and, all together, rows."""
        key = (num_seqs, num_rows)
        if key not in self._known:
            self._known[key] = self._ms(num_seqs, num_rows) / 1000
        return self._known[key]

    def step_costs(self) -> list[StepCost]:
        """The table as a worker measures it at start: one sequence."""
        return [StepCost(int(rows), 256, round(ms * 1e6)) for rows, ms in self._lines[1]]

    def _ms(self, num_seqs: int, num_rows: int) -> float:
        index = min(max(1, bisect_left(self._seqs, num_seqs)), len(self._seqs) - 1)
        few, many = self._seqs[index - 1], self._seqs[index]
        share = (num_seqs - few) / (many - few)
        # Along the line of each number of sequences by rows beyond one a sequence.
        ms_few, ms_many = (_on(self._lines[seqs], seqs + num_rows - num_seqs) for seqs in (few, many))
        return max(0.01, ms_few + share * (ms_many - ms_few))


def _on(line: Sequence[tuple[float, float]], rows: float) -> float:
    (rows_0, ms_0), (rows_1, ms_1) = next((pair for pair in pairwise(line) if rows <= pair[1][0]), (line[-2], line[-1]))
    return ms_0 + (ms_1 - ms_0) * (rows - rows_0) / (rows_1 - rows_0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one machine and pair; all but the tables in seconds."""

    verify: Table
    draft: Table | None
    """None = without a draft model."""
    cores: int
    verify_threads: int
    hop_s: float
    """From one process's send to the other's work: socket, wake-up, decoding."""
    router_frame_s: float
    """The router's work on a frame, and on each entry of it."""
    router_entry_s: float
    request_s: float
    """The router's work on a new request."""
    worker_step_s: float
    """A worker's work in addition to a forward."""
    ngram_s: float
    """An n-gram draft, or a look at how sure it would be."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Costs":
        """The costs in a file of `bench/economy`."""
        draft = Table(record["draft"]) if record.get("draft") else None
        return cls(Table(record["verify"]), draft, **record["machine"])


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, the target's answer, and the positions at which the draft model agrees."""

    prompt_ids: list[int]
    answer_ids: list[int]
    model_right: list[bool]
    """Per token of the answer, after the true text before it."""

    def with_model(self, rate: float, rng: random.Random) -> "Text":
        """The text with a draft model of this accuracy."""
        return replace(self, model_right=[rng.random() < rate for _ in self.answer_ids])

    def without_repetition(self, rng: random.Random) -> "Text":
        """A text of the same lengths in which n-grams find nothing."""
        ids = rng.sample(range(1_000_000), len(self.prompt_ids) + len(self.answer_ids))
        return replace(self, prompt_ids=ids[: len(self.prompt_ids)], answer_ids=ids[len(self.prompt_ids) :])


def load_costs(name: str) -> Costs:
    """Recorded costs by name: `pair` or `smollm2`."""
    return Costs.from_json(json.loads(_read(f"{name}_costs.json")))


def load_texts() -> list[Text]:
    """The recorded texts of the embedded pair."""
    return [
        Text(text["prompt_ids"], text["answer_ids"], [mark == "1" for mark in text["model_right"]])
        for text in json.loads(_read("pair_texts.json"))
    ]


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text()
