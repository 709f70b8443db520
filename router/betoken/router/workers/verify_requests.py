"""A router's requests to a verify worker for one sequence: to verify a draft, or to decode alone for a while.

The link carries both as a `DraftBlock`; here they are two things. Knows no session and no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from betoken.common.tree import is_path
from betoken.router.workers.draft import Draft
from betoken.v1.verify_pb2 import DraftBlock, VerificationResult


@dataclass(frozen=True, slots=True)
class Verification:
    """A draft of at least one token to hold against the target; one verification result answers it."""

    base_length: int
    """Committed tokens that the draft extends."""
    draft: Draft

    def block(self, sequence_id: int) -> DraftBlock:
        """The link's entry."""
        block = DraftBlock(sequence_id=sequence_id, base_length=self.base_length)
        block.draft_ids.extend(self.draft.ids)
        if self.draft.parents:
            block.parents.extend(self.draft.parents)
        if self.draft.probs:
            block.draft_probs.extend(self.draft.probs)
        return block

    def is_answered_by(self, result: VerificationResult) -> bool:
        """Whether what a verification result accepts can be of this draft."""
        if result.HasField("attached"):  # it answers a grant, and what it accepted is not of this draft
            return False
        if not result.num_accepted <= result.num_draft_tokens == len(self.draft.ids):
            return False
        parents, path = self.draft.parents, result.path
        return not parents or (len(path) == result.num_accepted and is_path(path, parents))


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to decode alone: plain steps, or rounds with a drafter of the worker's own. One result comes a step."""

    base_length: int
    """Committed tokens from which it counts."""
    num_tokens: int
    """Tokens that may be decoded after them."""
    num_draft_tokens: int = 0
    """Most draft tokens of a round; 0 = plain steps."""
    is_priced: bool = False
    """Whether the drafter may choose its draft length."""
    drafter: str = ""
    """Name of the attached drafter; empty = the drafter of the open entry."""

    @property
    def end(self) -> int:
        """Committed length up to which the worker may decode."""
        return self.base_length + self.num_tokens

    def block(self, sequence_id: int) -> DraftBlock:
        """The link's entry."""
        return DraftBlock(
            sequence_id=sequence_id,
            base_length=self.base_length,
            num_plain_steps=self.num_tokens,
            num_draft_tokens=self.num_draft_tokens,
            is_priced=self.is_priced,
            drafter=self.drafter if self.num_draft_tokens else "",
        )


NOTHING_GRANTED = Grant(base_length=0, num_tokens=0)
