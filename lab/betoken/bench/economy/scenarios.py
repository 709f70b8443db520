"""Scenarios of the simulator by name, and their speeds. Knows no rules."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from betoken.bench.economy.recorded import Costs, Text, load_costs, load_texts
from betoken.bench.economy.simulation import Outcome, Simulation, Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of traffic."""

    num_streams: int
    num_tokens: int = 96
    texts: str = "recorded"
    """`recorded`, `good` (a draft model that is right nine times in ten), `bad` (seldom, and nothing repeats itself),
    `mixed` (in turn), `no-ngrams` (good, and nothing repeats itself), `right` or `wrong` (the model always is)."""
    num_answers: int = 32
    num_before: int = 0
    """Number of warm-up repetitions of the traffic."""
    costs: str = "pair"
    drafter: str = "fused"
    texts_before: str = ""
    """Texts of the traffic before, if they differ."""
    num_prompt_ids: int = 0
    """Ids put before each prompt, which the draft model has to prefill for every answer."""
    shortest: float = 1.0
    """Length of the shortest answers, as a share of the longest."""
    held_up_s: float = 0.0
    """Seconds by which one verification takes longer; they do not count."""


SCENARIOS = {
    "one": Scenario(1),
    "four": Scenario(4),
    "sixteen": Scenario(16),
    "sixty-four": Scenario(64, num_answers=128),
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
    "held-up": Scenario(1, texts="no-ngrams", held_up_s=30.0, num_before=1),
    "long-prompts": Scenario(1, 16, num_answers=64, num_prompt_ids=1024),
    "recovered-model": Scenario(1, 16, num_answers=400, num_before=1, texts="right", texts_before="wrong"),
    "coder-one": Scenario(1, costs="coder", num_answers=16),
    "coder-four": Scenario(4, costs="coder"),
    "coder-eight": Scenario(8, 64, costs="coder", num_answers=16),
    "coder-eight-again": Scenario(8, 64, costs="coder", num_answers=16, num_before=2),
    "coder-one-prompts": Scenario(1, 64, costs="coder", num_answers=16, num_prompt_ids=128),
    "coder-eight-prompts": Scenario(8, 64, costs="coder", num_answers=16, num_prompt_ids=128),
    "coder-eight-uneven": Scenario(8, 64, costs="coder", num_answers=16, num_prompt_ids=128, shortest=0.25),
    "coder-sixteen": Scenario(16, costs="coder"),
    "smollm2-one": Scenario(1, costs="smollm2", drafter="ngram"),
    "smollm2-four": Scenario(4, costs="smollm2", drafter="ngram"),
    "smollm2-sixteen": Scenario(16, costs="smollm2", drafter="ngram"),
}


def run(name: str, seed: int | None, drafter: str | None = None) -> Outcome:
    """The scenario's last traffic; `drafter`: another than its own."""
    scenario = SCENARIOS[name]
    drafter = drafter or scenario.drafter
    simulation = Simulation(_costs(scenario.costs), drafter, seed)
    if scenario.num_prompt_ids and simulation.drafting is not None:
        simulation.drafting.model.caches_prompts = False
    for _ in range(scenario.num_before):
        simulation.run(_workload(scenario, scenario.texts_before or scenario.texts))
    simulation.verifying.held_up_s = scenario.held_up_s if drafter != "none" else 0.0
    outcome = simulation.run(_workload(scenario, scenario.texts))
    if simulation.verifying.held_up_s == 0.0 and drafter != "none":
        outcome.seconds -= scenario.held_up_s
    return outcome


def _workload(scenario: Scenario, kind: str) -> Workload:
    before = list(range(2_000_000, 2_000_000 + scenario.num_prompt_ids))
    texts = [_texts(kind)[index % 32] for index in range(scenario.num_answers)]
    texts = [replace(text, prompt_ids=[*before, *text.prompt_ids]) for text in texts]
    if scenario.shortest < 1.0:
        rng = random.Random(11)
        shares = [rng.uniform(scenario.shortest, 1.0) for _ in texts]
        lengths = [math.ceil(share * scenario.num_tokens) for share in shares]
        texts = [
            replace(text, answer_ids=text.answer_ids[:length]) for text, length in zip(texts, lengths, strict=True)
        ]
    return Workload(texts, scenario.num_streams, scenario.num_tokens)


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
    kinds = {"good": good, "bad": bad, "mixed": mixed}
    kinds["no-ngrams"] = [text.without_repetition(rng) for text in good]
    kinds["wrong"] = [text.with_model(0.0, rng) for text in texts]
    kinds["right"] = [text.with_model(1.0, rng) for text in texts]
    return kinds[kind]
