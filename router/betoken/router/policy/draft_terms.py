"""The terms that a draft request carries, from the load of a verify worker. The economy of drafts decides them."""

from __future__ import annotations

from betoken.common.economy.terms import DraftTerms, terms_at
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
