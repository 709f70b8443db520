"""One sequence on one draft worker: decided tokens go out, guesses come back.

Whatever comes back is checked and cut to what the target can verify; a fault raises and never reaches the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from betoken.router.workers.draft import Draft, usable_draft, usable_probs
from betoken.router.workers.mailbox import Mailbox, Patience
from betoken.v1.draft_pb2 import Commit, DraftedBlock, DraftRequest, DraftTerms


class DraftFailedError(Exception):
    """The round goes on without a usable draft."""


class DraftLateError(DraftFailedError):
    """The draft took too long; its session can be used again once the draft has come."""


class DraftTimeoutError(DraftFailedError):
    """The draft took too long, and this mode does not allow late drafts; the session is closed."""


class DraftUnavailableError(DraftFailedError):
    """No draft worker can open the sequence."""


class DraftWorkerLostError(DraftFailedError):
    """The session ended with its link, perhaps long ago: this says nothing of the worker that is there now."""


class DraftHost(Protocol):
    """The worker, as its sessions need it."""

    def ask(self, commits: Sequence[Commit], request: DraftRequest) -> None:
        """Send what was decided and the request for a draft.

        Raises:
            UnavailableError: the worker has just gone.
        """
        ...

    def close_session(self, session: DraftSession) -> None:
        """Free a session's sequence; idempotent."""
        ...

    def missed_draft(self, asked_s: float, *, is_pending: bool) -> None:
        """Record that a request sent at `asked_s` (`time.monotonic`) was not answered in time.

        `is_pending`: whether the worker has reported this request as waiting or in progress.
        """
        ...


class DraftSession:
    """The router's end of an open sequence."""

    __slots__ = ("_commits", "_has_probs", "_host", "_is_late", "_is_pending", "_mailbox", "sequence_id")

    def __init__(self, sequence_id: int, host: DraftHost, patience: Patience, has_probs: bool) -> None:
        """`has_probs`: whether drafts bring the distributions they were sampled from to the verify worker."""
        self.sequence_id = sequence_id
        self._host = host
        self._commits: list[Commit] = []
        self._has_probs = has_probs
        self._is_late = False
        self._is_pending = False
        self._mailbox: Mailbox[DraftedBlock] = Mailbox(patience)

    @property
    def is_late(self) -> bool:
        """Whether a late draft is still to come; none may be asked for meanwhile."""
        return self._is_late and self._mailbox.is_empty

    def commit(self, base_length: int, ids: Sequence[int]) -> None:
        """Send the drafter, with the next request, the tokens committed after `base_length`."""
        if self._commits:
            self._commits[-1].ids.extend(ids)  # of steps without a draft
        else:
            self._commits.append(Commit(sequence_id=self.sequence_id, base_length=base_length, ids=ids))

    async def draft(
        self,
        base_length: int,
        next_id: int,
        num_tokens: int,
        vocab_size: int,
        timeout_s: float,
        *,
        may_be_late: bool = False,
        takes_trees: bool = False,
        terms: DraftTerms | None = None,
        num_outcomes: int = 0,
    ) -> Draft:
        """At most `num_tokens` guesses, each below `vocab_size`, that extend `base_length` committed tokens, the last
        of which is `next_id`.

        A chain, unless the target `takes_trees`. Under `terms` a drafter with confidences chooses the number. The
        drafter may draft ahead for `num_outcomes` outcomes of the verification.

        Raises:
            DraftLateError: it takes longer than `timeout_s` and `may_be_late`: the session stays open, and can be used
                again once the draft has come.
            DraftFailedError: it takes longer than `timeout_s`, or is not an answer to this request; the session is of
                no more use.
            BetokenError: the worker's own error.
        """
        if self.is_late:
            raise DraftLateError("the last draft is still to come")
        if self._is_late:
            await self._mailbox.get(timeout_s)  # is there: guesses at what has been decided by now
        self._is_late = self._is_pending = False
        commits, self._commits = self._commits, []
        request = DraftRequest(
            sequence_id=self.sequence_id,
            base_length=base_length,
            next_id=next_id,
            num_tokens=num_tokens,
            takes_trees=takes_trees,
            terms=terms,
            num_outcomes=num_outcomes,
        )
        asked_ns, asked_s = time.perf_counter_ns(), time.monotonic()
        self._host.ask(commits, request)
        try:
            block = await self._mailbox.get(timeout_s)
        except TimeoutError:
            self._host.missed_draft(asked_s, is_pending=self._is_pending)
            self._is_late = may_be_late
            kind = DraftLateError if may_be_late else DraftTimeoutError
            raise kind(f"no draft within {timeout_s:.3g} s") from None
        if (block.base_length, block.next_id) != (base_length, next_id):
            given = f"length {block.base_length} and next id {block.next_id}"
            raise DraftFailedError(f"a draft for {given}, not {base_length} and {next_id}")
        max_tokens = terms.max_tokens if terms is not None else num_tokens
        elapsed_ns = time.perf_counter_ns() - asked_ns
        draft = usable_draft(block, max_tokens, vocab_size, takes_trees, elapsed_ns)
        if self._has_probs and block.draft_probs:
            return draft._replace(probs=usable_probs(block, draft.ids, vocab_size))
        return draft

    def close(self) -> None:
        """Free the sequence on the worker; idempotent."""
        self._host.close_session(self)

    def pending(self) -> None:
        """The worker is at work on the draft, or on others before it."""
        self._is_pending = True

    def deliver(self, block: DraftedBlock) -> None:
        """An answer came from the link."""
        self._mailbox.put(block)

    def fail(self, error: Exception) -> None:
        """The answer will never come."""
        self._mailbox.fail(error)
