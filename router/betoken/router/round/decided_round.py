"""A draft with the verification result on it: which tokens the target decided, whose they are, and why they are there.

Knows no session and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from betoken.common.names import PREDICTION
from betoken.router.round.events import EmittedRound
from betoken.router.text.answer import Kept
from betoken.router.workers.attached_draft import AttachedDraft
from betoken.router.workers.draft import Draft
from betoken.v1.generation_pb2 import RoundTimes
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
    TokenOrigin,
)
from betoken.v1.verify_pb2 import VerificationResult


@dataclass(frozen=True, slots=True)
class DecidedRound:
    """One round, or one plain step, whose draft is empty."""

    draft: Draft | AttachedDraft
    result: VerificationResult
    path: Sequence[int]
    """Accepted nodes of the draft, root first."""
    ids: Sequence[int]
    """Emitted ids: the accepted ones and the target's own after them."""
    sources: Sequence[str]
    """Name of the drafter of each accepted id; empty if unknown."""

    @classmethod
    def of(cls, draft: Draft | AttachedDraft, result: VerificationResult) -> DecidedRound:
        """The round of a draft and its verification result."""
        path = result.path if draft.parents else range(result.num_accepted)
        accepted, sources = draft.along(path)
        return cls(draft, result, path, [*accepted, result.next_id], sources)

    def num_accepted(self, num_kept: int) -> int:
        """Accepted tokens among the leading `num_kept`: the answer may have ended inside the accepted prefix."""
        return min(len(self.path), num_kept)

    def num_predicted(self, num_kept: int) -> int:
        """Accepted tokens among them that the request expects."""
        return list(self.sources[:num_kept]).count(PREDICTION)

    def emitted(self, kept: Kept, times: RoundTimes | None) -> EmittedRound:
        """The client's part of it: as many tokens as the answer keeps."""
        num = kept.num_tokens
        return EmittedRound(
            self.ids[:num],
            self._origins()[:num],
            [*self.sources[:num], *[""] * (num - len(self.sources))],
            self.result.logprobs[:num] if self.result.logprobs else (),
            kept.text,
            kept.num_chars,
            times,
            kept.num_held_chars,
        )

    def times(self, num_kept: int, begin_ns: int, duration_ns: int) -> RoundTimes:
        """Where its time went. `begin_ns` counts from the request's arrival."""
        return RoundTimes(
            num_tokens=num_kept,
            num_draft_tokens=self.draft.num_tokens,
            num_accepted_tokens=self.num_accepted(num_kept),
            begin_ns=begin_ns,
            duration_ns=duration_ns,
            draft_queue_ns=self.draft.queue_ns,
            draft_forward_ns=self.draft.forward_ns,
            verify_queue_ns=self.result.queue_ns,
            verify_forward_ns=self.result.forward_ns,
        )

    def _origins(self) -> list[TokenOrigin]:
        origins: list[TokenOrigin] = [TOKEN_ORIGIN_ACCEPTED] * len(self.path)
        if not self.draft.num_tokens:
            origins.append(TOKEN_ORIGIN_PLAIN)
        elif self.draft.is_exhausted_by(self.path):
            origins.append(TOKEN_ORIGIN_BONUS)
        else:
            origins.append(TOKEN_ORIGIN_RECOVERED)
        return origins
