"""One sequence on one draft worker: decided tokens go out, guesses come back.

Whatever comes back is checked and cut to what the target can verify; a fault raises and never reaches the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from betoken.common.errors import InvalidArgumentError
from betoken.router.workers import draft_tree
from betoken.router.workers.mailbox import Mailbox, Patience
from betoken.rpc.validation import validate_distribution
from betoken.v1.draft_pb2 import Commit, DraftedBlock, DraftRequest, DraftTerms
from betoken.v1.types_pb2 import SparseDistribution

_MAX_SOURCE_CHARS = 64


class DraftFailedError(Exception):
    """The round goes on without a usable draft."""


class DraftLateError(DraftFailedError):
    """The worker is at it; its session is of use again once the draft has come."""


class DraftWorkerLostError(DraftFailedError):
    """The session ended with its link, perhaps long ago: this says nothing of the worker that is there now."""


class Draft(NamedTuple):
    """A chain or tree of guesses for one round; empty = none."""

    ids: Sequence[int] = ()
    sources: Sequence[str] = ()
    """Names of the drafters that proposed the ids: one for all, one per id, or none."""
    queue_ns: int = 0
    forward_ns: int = 0
    parents: Sequence[int] = ()
    """Parent index per id, -1 = the last committed token; empty = a chain."""
    probs: Sequence[SparseDistribution] = ()
    """What each id was sampled from; empty = each was certain."""
    num_forwards: int = 0
    """Forwards of the drafter's models since its last answer."""

    @property
    def num_tokens(self) -> int:
        """Draft tokens, those of all branches."""
        return len(self.ids)

    @property
    def depth(self) -> int:
        """Most ids that can be accepted."""
        return draft_tree.depth(self.parents) if self.parents else len(self.ids)

    def along(self, path: Sequence[int]) -> tuple[Sequence[int], Sequence[str]]:
        """Ids, and sources if there are any, of the nodes of an accepted `path`."""
        sources = self.sources
        if len(sources) == 1:
            sources = (sources[0],) * len(self.ids)
        if not self.parents:
            return self.ids[: len(path)], sources[: len(path)]
        return [self.ids[node] for node in path], [sources[node] for node in path] if sources else ()

    def is_exhausted_by(self, path: Sequence[int]) -> bool:
        """Whether nothing was proposed after the accepted `path`."""
        last = path[-1] if path else -1
        return last not in self.parents if self.parents else last == len(self.ids) - 1


NO_DRAFT = Draft()


class DraftSession:
    """The router's end of an open sequence."""

    __slots__ = ("_close", "_commits", "_has_probs", "_is_late", "_is_pending", "_mailbox", "_send", "sequence_id")

    def __init__(
        self,
        sequence_id: int,
        patience: Patience,
        send: Callable[[Sequence[Commit], DraftRequest], None],
        close: Callable[[DraftSession], None],
        has_probs: bool,
    ) -> None:
        """`has_probs`: whether drafts bring the distributions they were sampled from to the verify worker."""
        self.sequence_id = sequence_id
        self._send = send
        self._commits: list[Commit] = []
        self._close = close
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
        self._send(commits, request)
        block = await self._answer(timeout_s, patience_s)
        if block.base_length != base_length:
            raise DraftFailedError(f"a draft for length {block.base_length}, not {base_length}")
        max_tokens = terms.max_tokens if terms is not None else num_tokens
        elapsed_ns = time.perf_counter_ns() - asked_ns
        draft = _usable(block, max_tokens, vocab_size, takes_trees, elapsed_ns)
        if self._has_probs and block.draft_probs:
            return draft._replace(probs=_usable_probs(block, draft.ids, vocab_size))
        return draft

    def close(self) -> None:
        """Free the sequence on the worker; idempotent."""
        self._close(self)

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


def _usable(block: DraftedBlock, num_tokens: int, vocab_size: int, takes_trees: bool, elapsed_ns: int) -> Draft:
    """The block's first `num_tokens` nodes, up to the first that no target of this vocabulary or kind could take.

    Its times are at most `elapsed_ns`, or sums of them would overflow.
    """
    ids = block.ids[:num_tokens]
    parents: Sequence[int] = ()
    if block.parents:
        parents = block.parents[: len(ids)]
        num_kept = draft_tree.num_sound(parents) if takes_trees else draft_tree.leading_chain(parents)
        del ids[num_kept:]
    if ids and max(ids) >= vocab_size:
        del ids[next(index for index, token_id in enumerate(ids) if token_id >= vocab_size) :]
    if parents:
        parents = parents[: len(ids)]
        if draft_tree.leading_chain(parents) == len(parents):
            parents = ()
    sources: Sequence[str] = block.sources[: len(ids)]
    if len(sources) not in (1, len(ids)) or max(map(len, sources), default=0) > _MAX_SOURCE_CHARS:
        sources = ()
    forward_ns = min(block.forward_ns, elapsed_ns)
    queue_ns = min(block.queue_ns, elapsed_ns - forward_ns)
    return Draft(ids, sources, queue_ns, forward_ns, parents, num_forwards=block.num_forwards)


def _usable_probs(block: DraftedBlock, ids: Sequence[int], vocab_size: int) -> list[SparseDistribution]:
    """One distribution per id. Where the drafter gives no distribution, the id counts as certain. That is as exact for
    any id chosen without the verify worker's noise."""
    probs = []
    for index, token_id in enumerate(ids):
        try:
            distribution = block.draft_probs[index]
            validate_distribution("draft_probs", distribution, token_id, vocab_size)
        except (IndexError, InvalidArgumentError):
            distribution = SparseDistribution(token_ids=[token_id], probs=[1.0])
        probs.append(distribution)
    return probs
