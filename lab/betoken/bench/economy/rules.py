"""The rules of the economy of drafts, and how each is switched off for a run of the simulator."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from betoken.common.economy import gate, prospect, row_price, sources, terms
from betoken.common.economy.acceptance import Calibration
from betoken.common.economy.gate import SpeculationGate
from betoken.common.economy.row_price import RowPrice

_OPEN = property(lambda _: True)

RULES: dict[str, list[tuple[Any, str, Any]]] = {
    "gate: trials and expectation": [
        (SpeculationGate, "is_open", _OPEN),
        (SpeculationGate, "record", lambda *_: None),
    ],
    "gate: expectation": [(SpeculationGate, "_expected", lambda *_: 0.0)],
    "gate: trials": [(gate, "_LEAST_PAUSE_S", math.inf), (gate, "_LEAST_LONE_PAUSE_S", math.inf)],
    "gate: prior of a new drafter": [(prospect, "_PRIOR_STEPS", 0.001)],
    "gate: pause by what a trial costs": [(gate, "_TRIAL_SHARE", math.inf)],
    "terms: price of a row": [(RowPrice, "price", property(lambda _: 0.0))],
    "terms: price learned from forwards": [(row_price, "_LEARNING", 0.0)],
    "terms: trials of the price": [(terms, "_TOKENS_PER_TRIAL", 10**12)],
    "terms: least gain": [(terms, "_SAVED_SHARE", 0.0)],
    "terms: longer pauses": [(terms, "_LONGEST_PAUSE", 2)],
    "acceptance: calibration": [(Calibration, "score", lambda _, share: share)],
    "sources: what other sequences taught": [(sources, "_PRIOR_ROUNDS", 0.01)],
    "sources: first rounds apart": [(sources, "_MANY_MISSED", math.inf)],
    "sources: prefill borne by five rounds": [(sources, "_ROUNDS_AFTER_FIRST", math.inf)],
    "sources: trials by cost": [(sources, "_TRIAL_SHARE", math.inf)],
    "sources: trials by all sequences": [(sources, "_LONGEST_COMMON_PAUSE", math.inf)],
    "sources: long rounds cut": [(sources, "_MOST_TIMES_USUAL", math.inf)],
}
"""Replacements while a rule is off: owner, name, replacement."""


@contextmanager
def switched_off(rule: str) -> Iterator[None]:
    """Without that rule."""
    patches = [patch.object(owner, name, value) for owner, name, value in RULES[rule]]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
