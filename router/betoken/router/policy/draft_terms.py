"""How long a draft may be where the request leaves that open: what drafts cost and have to bring, in tokens.

Time is counted as the tokens that a verify worker emits meanwhile. Knows nothing of sequences or drafters.
"""

from __future__ import annotations

import math

from betoken.v1.draft_pb2 import DraftTerms
from betoken.v1.types_pb2 import Load

USUAL_DRAFT_TOKENS = 5
"""Draft tokens asked of drafters that cannot tell how sure they are."""
MAX_DRAFT_TOKENS = 16
"""Most draft tokens, where no worker has said what it takes."""

FIRST_PAUSE, LONGEST_PAUSE = 2, 8
"""Plain steps after an empty draft; twice as many after each further one."""
_SAVED_SHARE = 0.75
"""Part of the cost of asking that an empty draft saves, with four steps or so until the next asking."""


def draft_terms(load: Load, max_tokens: int, asking_s: float) -> DraftTerms | None:
    """Terms under the `load` of a verify worker; None while its speed is unknown, or speed or price is out of range.

    A row of a forward holds up all sequences, waiting only the one that waits.

    `asking_s`: what asking for a draft takes, drafting excluded.
    """
    if not (0.0 < load.tokens_per_s < math.inf and load.row_price >= 0.0):
        return None
    sequence_tokens_per_s = load.tokens_per_s / max(1, load.running)
    return DraftTerms(
        max_tokens=max_tokens,
        row_price=load.row_price,
        min_gain=_SAVED_SHARE * asking_s * sequence_tokens_per_s,
    )
