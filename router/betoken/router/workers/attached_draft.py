"""The attached draft and its acceptance, read from a verification result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from betoken.v1.verify_pb2 import VerificationResult

_MAX_SOURCE_CHARS = 64


class AttachedDraft(NamedTuple):
    """A draft of which only the accepted part is known; takes the place of a verified `Draft`."""

    accepted_ids: Sequence[int]
    sources: Sequence[str]
    """Names of the drafters that proposed them: one for all, one per id, or none."""
    num_tokens: int
    depth: int
    is_exhausted: bool
    forward_ns: int
    num_forwards: int
    num_predicted_tokens: int
    """Draft tokens that the request expects."""
    queue_ns: int = 0
    parents: Sequence[int] = ()

    def along(self, path: Sequence[int]) -> tuple[Sequence[int], Sequence[str]]:
        """The accepted ids, and sources if there are any."""
        sources = self.sources
        return self.accepted_ids, (sources[0],) * len(path) if len(sources) == 1 else sources

    def is_exhausted_by(self, path: Sequence[int]) -> bool:
        """Whether nothing was proposed after what was accepted."""
        return self.is_exhausted


def attached_draft(result: VerificationResult) -> AttachedDraft | None:
    """The worker's own draft; None without a draft."""
    if not result.HasField("attached"):
        return None
    own = result.attached
    sources: Sequence[str] = own.sources
    if len(sources) not in (1, len(own.accepted_ids)) or max(map(len, sources), default=0) > _MAX_SOURCE_CHARS:
        sources = ()
    return AttachedDraft(
        own.accepted_ids,
        sources,
        result.num_draft_tokens,
        own.depth,
        own.is_exhausted,
        own.forward_ns,
        own.num_forwards,
        own.num_predicted_tokens,
    )


def can_be(result: VerificationResult, vocab_size: int, max_draft_tokens: int) -> bool:
    """Whether the fields of a verification result's attached draft are consistent."""
    own = result.attached
    return (
        len(own.accepted_ids) == result.num_accepted <= own.depth <= result.num_draft_tokens <= max_draft_tokens
        and own.num_predicted_tokens <= result.num_draft_tokens
        and max(own.accepted_ids, default=0) < vocab_size
    )
