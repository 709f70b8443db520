"""The rules of the economy of drafts, and how each is switched off for a run of the simulator."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from betoken.common.economy import expected_gain, policy, row_price, sources, terms
from betoken.common.economy.acceptance import Calibration
from betoken.common.economy.draft_length import RoundTime, SequenceDraftLength
from betoken.common.economy.policy import SpeculationPolicy
from betoken.common.economy.row_price import RowPrice

_ON = property(lambda _: True)


def _usual_length(_: SequenceDraftLength, time: RoundTime, num_tokens: int, *, can_pause: bool = True) -> int:
    return min(num_tokens, terms.USUAL_DRAFT_TOKENS)


RULES: dict[str, list[tuple[Any, str, Any]]] = {
    "policy: exploration and expectation": [
        (SpeculationPolicy, "is_on", _ON),
        (SpeculationPolicy, "record", lambda *_: None),
    ],
    "policy: expectation": [(SpeculationPolicy, "_expected", lambda *_: 0.0)],
    "policy: exploration": [(policy, "_LEAST_PAUSE_S", math.inf), (policy, "_LEAST_LONE_PAUSE_S", math.inf)],
    "policy: prior of a new drafter": [(expected_gain, "_PRIOR_STEPS", 0.001)],
    "policy: pause by what a trial costs": [(policy, "_TRIAL_SHARE", math.inf)],
    "draft length: by price": [(SequenceDraftLength, "next", _usual_length)],
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
