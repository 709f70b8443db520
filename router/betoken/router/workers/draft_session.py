"""One sequence on one draft worker: decided tokens go out, guesses come back.

Whatever comes back is checked and cut to what the target can verify; a fault raises and never reaches the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from betoken.router.workers.draft import Draft, usable_draft, usable_probs
from betoken.router.workers.mailbox import Mailbox, Patience
from betoken.rpc.validation.entries import MAX_OUTCOMES
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

    __slots__ = (
        *("_ahead", "_commits", "_has_probs", "_host", "_is_late", "_is_pending", "_mailbox", "_surplus"),
        "sequence_id",
    )

    def __init__(self, sequence_id: int, host: DraftHost, patience: Patience, has_probs: bool) -> None:
        """`has_probs`: whether drafts bring the distributions they were sampled from to the verify worker."""
        self.sequence_id = sequence_id
        self._host = host
        self._commits: list[Commit] = []
        self._has_probs = has_probs
        self._is_late = False
        self._is_pending = False
        self._mailbox: Mailbox[DraftedBlock] = Mailbox(patience)
        self._ahead: dict[tuple[int, int], DraftedBlock] = {}
        """Drafts pushed since the last response, by base length and next id."""
        self._surplus: tuple[int, int] | None = None
        """Key of a request whose draft had been pushed; its response is dropped when it comes."""

    @property
    def is_late(self) -> bool:
        """Whether a late draft is still to come; none may be asked for meanwhile."""
        return self._is_late and self._mailbox.is_empty

    @property
    def num_missed_tokens(self) -> int:
        """Tokens committed since the last request."""
        return sum(len(commit.ids) for commit in self._commits)

    async def catch_up(self, base_length: int, next_id: int) -> None:
        """Send the commits and a request whose draft is dropped, so that the next request finds the drafter up to date.

        The session is late until the draft has come.

        Raises:
            DraftFailedError: the session is of no more use.
            BetokenError: the worker's own error, or it has just gone.
        """
        if self._is_late:
            await self._mailbox.get(0.0)  # is there: the session is not late
        commits, self._commits = self._commits, []
        self._ahead.clear()
        self._is_late, self._is_pending = True, False
        request = DraftRequest(sequence_id=self.sequence_id, base_length=base_length, next_id=next_id, num_tokens=1)
        self._host.ask(commits, request)

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
        key = base_length, next_id
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
        max_tokens = terms.max_tokens if terms is not None else num_tokens
        pushed = self._take_pushed(key, max_tokens, vocab_size)
        self._host.ask(commits, request)
        if pushed is not None:
            return pushed
        try:
            block = await self._mailbox.get(timeout_s)
        except TimeoutError:
            self._host.missed_draft(asked_s, is_pending=self._is_pending)
            self._is_late = may_be_late
            kind = DraftLateError if may_be_late else DraftTimeoutError
            raise kind(f"no draft within {timeout_s:.3g} s") from None
        _check_key(block, key)
        draft = usable_draft(block, max_tokens, vocab_size, takes_trees, time.perf_counter_ns() - asked_ns)
        if self._has_probs and block.draft_probs:
            return draft._replace(probs=usable_probs(block, draft.ids, vocab_size))
        return draft

    def _take_pushed(self, key: tuple[int, int], num_tokens: int, vocab_size: int) -> Draft | None:
        """The pushed draft for a text of this length and last id; drops the others. None while the response to an
        earlier request is to be dropped, or a worker that only pushes would get any number of them."""
        block = self._ahead.get(key) if self._surplus is None else None
        self._ahead.clear()
        draft = usable_draft(block, num_tokens, vocab_size, False, 0) if block is not None else None
        if draft is None or not draft.ids:
            return None
        self._surplus = key
        return draft

    def close(self) -> None:
        """Free the sequence on the worker; idempotent."""
        self._host.close_session(self)

    def pending(self) -> None:
        """The worker is at work on the draft, or on others before it."""
        self._is_pending = True

    def deliver(self, block: DraftedBlock) -> None:
        """A draft came from the link."""
        key = block.base_length, block.next_id
        if block.is_ahead:
            if len(self._ahead) < MAX_OUTCOMES:
                self._ahead[key] = block
            return
        self._ahead.clear()  # they were for the draft before
        if key == self._surplus:
            self._surplus = None
        else:
            self._mailbox.put(block)

    def fail(self, error: Exception) -> None:
        """The answer will never come."""
        self._mailbox.fail(error)


def _check_key(block: DraftedBlock, key: tuple[int, int]) -> None:
    """Raise DraftFailedError unless the draft is for a text of this length and last id."""
    if (block.base_length, block.next_id) != key:
        given = f"length {block.base_length} and next id {block.next_id}"
        raise DraftFailedError(f"a draft for {given}, not {key[0]} and {key[1]}")
