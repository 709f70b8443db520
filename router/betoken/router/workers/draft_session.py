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
    """The worker is at it; its session is of use again once the draft has come."""


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
        """Tell the drafter, with the next request, what the target decided after `base_length` tokens."""
        if self._commits:
            self._commits[-1].ids.extend(ids)  # of steps without a draft
        else:
            self._commits.append(Commit(sequence_id=self.sequence_id, base_length=base_length, ids=ids))

    async def draft(
        self,
        base_length: int,
        num_tokens: int,
        vocab_size: int,
        timeout_s: float,
        *,
        patience_s: float | None = None,
        takes_trees: bool = False,
        terms: DraftTerms | None = None,
    ) -> Draft:
        """At most `num_tokens` guesses, each below `vocab_size`, that extend `base_length` committed tokens.

        A chain, unless the target `takes_trees`. Under `terms` a drafter that can tell what pays chooses the number.

        Raises:
            DraftLateError: it takes longer than `patience_s` (None = no such limit), but the worker is at it.
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
            sequence_id=self.sequence_id, num_tokens=num_tokens, takes_trees=takes_trees, terms=terms
        )
        asked_ns = time.perf_counter_ns()
        self._host.ask(commits, request)
        block = await self._answer(timeout_s, patience_s)
        if block.base_length != base_length:
            raise DraftFailedError(f"a draft for length {block.base_length}, not {base_length}")
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

    async def _answer(self, timeout_s: float, patience_s: float | None) -> DraftedBlock:
        left_s = timeout_s
        while left_s > 0:
            wait_s = left_s if patience_s is None else min(patience_s, left_s)
            try:
                return await self._mailbox.get(wait_s)
            except TimeoutError:
                pass
            if patience_s is not None and self._is_pending:
                self._is_late = True
                raise DraftLateError("the worker is still at it")
            left_s -= wait_s
        raise DraftFailedError(f"no draft within {timeout_s:g} s")
