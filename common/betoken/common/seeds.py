"""Seeds of the further answers of one request, so that each can be had alone, too. Knows numbers only."""

from __future__ import annotations

import hashlib

SEED_BITS = 53
"""Bits of seeds that are made: JSON's numbers hold no more in JavaScript."""


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with this seed, index >= 1; below 2^53."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
