"""One sequence on one verify worker: blocks and grants go out, verdicts come back, in order.

Checks every verdict against what was asked; knows neither drafts' origin nor text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeAlias

from betoken.router.workers.attached_draft import can_be
from betoken.router.workers.draft_session import Draft
from betoken.router.workers.draft_tree import is_path
from betoken.router.workers.mailbox import Mailbox, Patience
from betoken.v1.verify_pb2 import DraftBlock, Stale, Verdict

Decision: TypeAlias = Verdict | Stale

_SILENCE_CHECK_S = 0.1
"""From one question whether a silence is long enough to the next."""


class SequenceLostError(Exception):
    """The worker does not hold the sequence any more, or cannot be trusted with it; it has to be re-opened."""


class VerifySession:
    """The router's end of an open sequence."""

    __slots__ = (
        *("_close", "_has_logprobs", "_is_pending", "_mailbox", "_on_pending", "_on_silence", "_send_block"),
        *("_max_attached", "_timeout_s", "_vocab_size", "granted_drafts", "granted_length", "sequence_id"),
    )

    def __init__(
        self,
        sequence_id: int,
        vocab_size: int,
        timeout_s: float,
        patience: Patience,
        send_block: Callable[[DraftBlock], None],
        close: Callable[[VerifySession], None],
        on_pending: Callable[[], None],
        on_silence: Callable[[], None],
        has_logprobs: bool = False,
        max_attached: int = 0,
    ) -> None:
        """`on_pending`: called when the worker says that the block still waits for its turn; `on_silence` when the
        sequence is lost because it says nothing.

        `has_logprobs`: whether every token has to come with its logprobs. `max_attached`: most draft tokens of a round
        that the worker's own drafter proposes; 0 = the sequence has none.
        """
        self.sequence_id = sequence_id
        self.granted_length = 0
        """Committed length up to which the worker may decode alone."""
        self.granted_drafts = 0
        """Draft tokens of a round under the grant, by the worker's own drafter; 0 = plain steps."""
        self._max_attached = max_attached
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._send_block = send_block
        self._close = close
        self._on_pending = on_pending
        self._on_silence = on_silence
        self._is_pending = False
        self._has_logprobs = has_logprobs
        self._mailbox: Mailbox[Decision] = Mailbox(patience)

    async def verify(self, base_length: int, draft: Draft) -> Verdict:
        """The target's decision on a block that extends `base_length` committed tokens; no grant may be running.

        Raises:
            SequenceLostError: re-open the sequence.
            BetokenError: the worker refused the sequence for good.
        """
        block = DraftBlock(sequence_id=self.sequence_id, base_length=base_length)
        block.draft_ids.extend(draft.ids)
        if draft.parents:
            block.parents.extend(draft.parents)
        if draft.probs:
            block.draft_probs.extend(draft.probs)
        self._send_block(block)
        verdict = await self._decision(base_length, len(draft.ids))
        if draft.parents and not (len(verdict.path) == verdict.num_accepted and is_path(verdict.path, draft.parents)):
            raise SequenceLostError(f"a verdict that cannot be: accepted {verdict.num_accepted} along {verdict.path}")
        return verdict

    @property
    def is_attached(self) -> bool:
        """Whether the worker drafts for this sequence itself, according to its grants."""
        return self._max_attached > 0

    def grant(self, base_length: int, num_steps: int, num_draft_tokens: int = 0, *, is_priced: bool = False) -> None:
        """Let the worker decode alone up to `base_length + num_steps`, with drafts of its own of a given length, or of
        as many tokens as pay."""
        self.granted_length, self.granted_drafts = base_length + num_steps, num_draft_tokens
        block = DraftBlock(sequence_id=self.sequence_id, base_length=base_length, num_plain_steps=num_steps)
        block.num_draft_tokens, block.is_priced = min(num_draft_tokens, self._max_attached), is_priced
        self._send_block(block)

    async def next_plain(self, base_length: int, is_enough: Callable[[float], bool] | None = None) -> Verdict:
        """The next step under a grant. Raises as `verify`.

        `is_enough`: asked now and then whether a given number of seconds without a sign of work suffices, even fewer
            than usual.
        """
        return await self._decision(base_length, 0, is_enough)

    def close(self) -> None:
        """Free the sequence on the worker; idempotent."""
        self._close(self)

    def deliver(self, decision: Decision) -> None:
        """An answer came from the link."""
        self._mailbox.put(decision)

    def pending(self) -> None:
        """The worker is at work and the block's turn will come: its wait begins anew."""
        self._is_pending = True
        self._on_pending()

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        self._mailbox.fail(error)

    async def _decision(
        self, base_length: int, num_draft_tokens: int, is_enough: Callable[[float], bool] | None = None
    ) -> Verdict:
        wait_s = self._timeout_s if is_enough is None else min(_SILENCE_CHECK_S, self._timeout_s)
        since_s = time.monotonic()
        while True:
            self._is_pending = False
            try:
                decision = await self._mailbox.get(wait_s)
                break
            except TimeoutError:
                now_s = time.monotonic()
                if self._is_pending:
                    since_s = now_s  # re-opened, it would have its prompt computed again, behind all others
                silent_s = now_s - since_s
                if silent_s >= self._timeout_s or (is_enough is not None and is_enough(silent_s)):
                    self._on_silence()
                    raise SequenceLostError(f"no verdict within {round(silent_s, 1):g} s") from None
        if isinstance(decision, Stale):
            raise SequenceLostError(f"block at {base_length} is stale: the worker stands at {decision.length}")
        if decision.HasField("attached") and num_draft_tokens == 0:
            is_of_request = can_be(decision, self._vocab_size, self._max_attached)
        else:
            is_of_request = decision.num_accepted <= decision.num_draft_tokens == num_draft_tokens
        if (
            decision.base_length != base_length
            or not is_of_request
            or decision.next_id >= self._vocab_size
            or (not _are_logprobs(decision) if self._has_logprobs else decision.logprobs)
        ):
            raise SequenceLostError(
                f"a verdict that cannot be: {_brief(decision)} on {num_draft_tokens} at {base_length}"
            )
        return decision


def _are_logprobs(verdict: Verdict) -> bool:
    """True if every emitted token has well-formed logprobs."""
    return len(verdict.logprobs) == verdict.num_accepted + 1 and all(
        len(entry.top_ids) == len(entry.top_logprobs) and not any(map(math.isnan, (entry.logprob, *entry.top_logprobs)))
        for entry in verdict.logprobs
    )


def _brief(verdict: Verdict) -> str:
    return f"base {verdict.base_length}, accepted {verdict.num_accepted}, next id {verdict.next_id}"
