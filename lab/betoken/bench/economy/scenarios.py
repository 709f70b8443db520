"""Scenarios of the simulator by name, and their speeds. Knows no rules."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from betoken.bench.economy.recorded import Costs, Text, load_costs, load_texts
from betoken.bench.economy.simulation import Outcome, Simulation, Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of traffic."""

    num_streams: int
    num_tokens: int = 96
    texts: str = "recorded"
    """`recorded`, `good` (a draft model that is right nine times in ten), `bad` (seldom, and nothing repeats itself) or
    `mixed` (in turn)."""
    num_answers: int = 32
    num_before: int = 0
    """Number of warm-up repetitions of the traffic."""
    costs: str = "pair"
    drafter: str = "fused"


SCENARIOS = {
    "one": Scenario(1),
    "four": Scenario(4),
    "sixteen": Scenario(16),
    "four-again": Scenario(4, num_before=2),
    "sixteen-again": Scenario(16, num_before=2),
    "one-long": Scenario(1, 288, num_answers=16),
    "four-long": Scenario(4, 288, num_answers=64),
    "sixteen-long": Scenario(16, 288, num_answers=128),
    "four-good": Scenario(4, texts="good"),
    "four-bad": Scenario(4, texts="bad"),
    "four-mixed": Scenario(4, texts="mixed"),
    "sixteen-good": Scenario(16, texts="good"),
    "sixteen-bad": Scenario(16, texts="bad"),
    "sixteen-mixed": Scenario(16, texts="mixed"),
    "smollm2-one": Scenario(1, costs="smollm2", drafter="ngram"),
    "smollm2-four": Scenario(4, costs="smollm2", drafter="ngram"),
    "smollm2-sixteen": Scenario(16, costs="smollm2", drafter="ngram"),
}


def run(name: str, seed: int | None, drafter: str | None = None) -> Outcome:
    """The scenario's last traffic; `drafter`: another than its own."""
    scenario = SCENARIOS[name]
    drafter = drafter or scenario.drafter
    simulation = Simulation(_costs(scenario.costs), drafter, seed)
    texts = [_texts(scenario.texts)[index % 32] for index in range(scenario.num_answers)]
    workload = Workload(texts, scenario.num_streams, scenario.num_tokens)
    for _ in range(scenario.num_before):
        simulation.run(workload)
    return simulation.run(workload)


def speed(name: str, seed: int | None, drafter: str | None = None) -> float:
    """Tokens per second of a scenario. The speed without drafts is computed once."""
    return _plain_speed(name, seed) if drafter == "none" else run(name, seed, drafter).tokens_per_s


@cache
def _plain_speed(name: str, seed: int | None) -> float:
    return run(name, seed, "none").tokens_per_s


@cache
def _costs(name: str) -> Costs:
    return load_costs(name)


@cache
def _texts(kind: str) -> Sequence[Text]:
    texts, rng = load_texts(), random.Random(5)
    if kind == "recorded":
        return texts
    good = [text.with_model(0.9, rng) for text in texts]
    bad = [text.with_model(0.15, rng).without_repetition(rng) for text in texts]
    mixed = [(bad, good)[index % 2][index] for index in range(len(texts))]
    return {"good": good, "bad": bad, "mixed": mixed}[kind]
