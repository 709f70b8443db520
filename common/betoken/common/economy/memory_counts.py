"""Counts of a memory of earlier texts, as workers report them."""

from __future__ import annotations

from typing import NamedTuple


class MemoryCounts(NamedTuple):
    """Contents of a memory and events since it was made."""

    num_documents: int = 0
    num_tokens: int = 0
    num_hits: int = 0
    """Drafts from the memory."""
    num_evicted: int = 0
    """Evicted documents."""
