"""Forced tokens: if a sequence's constraint allows only one token, it is the target's, whatever its logits are.

So every one of them is accepted, in each mode, and costs no more than the row that it would take anyway.
Knows the sequence's rules; knows no schemas and no other drafters.
"""

from __future__ import annotations

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.immediate import ImmediateDrafter


class GrammarDrafter(ImmediateDrafter):
    """Drafts the run of forced tokens that follows, if any. It has no settings; without a constraint it is silent."""

    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        # Each is worth its row at any price: terms bound the number alone.
        num_tokens = num_tokens if sequence.terms is None else sequence.terms.max_tokens
        return Drafted(sequence, sequence.rules.forced_ids(num_tokens) if sequence.rules is not None else [])

    def confidence(self, sequence: DraftSequence) -> int:
        """1 if a token is forced, else 0."""
        return int(sequence.rules is not None and bool(sequence.rules.forced_ids(1)))
