"""Terms of draft requests and times of forwards, from the load of a verify worker."""

from __future__ import annotations

import math

from betoken.common.economy.terms import DraftTerms, row_seconds, terms_at
from betoken.common.step_times import ForwardTimes, StepTimes
from betoken.v1 import draft_pb2
from betoken.v1.types_pb2 import Load


def draft_terms(load: Load, max_tokens: int, asking_s: float) -> DraftTerms | None:
    """Terms under the `load` of a verify worker; None until it reports a speed and a price.

    `asking_s`: what asking for a draft takes, drafting excluded.
    """
    return terms_at(load.tokens_per_s, load.running, load.row_price, max_tokens, asking_s)


def terms_entry(terms: DraftTerms) -> draft_pb2.DraftTerms:
    """Terms as they go to a draft worker."""
    return draft_pb2.DraftTerms(max_tokens=terms.max_tokens, row_price=terms.row_price, min_gain=terms.min_gain)


def forward_times(table: StepTimes, load: Load | None) -> ForwardTimes:
    """Return the times of forwards under the `load` of a verify worker; None = not reported yet."""
    if load is None:
        return table.at_load(1, 0.0, 0.0)
    token_s = row_seconds(load.row_price, load.tokens_per_s)
    ratio = load.step_time_ratio if 0.0 < load.step_time_ratio < math.inf else 0.0
    return table.at_load(max(1, load.running), token_s, ratio)
