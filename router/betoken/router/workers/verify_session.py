"""One sequence on one verify worker: verifications and grants go out, verification results come back, in order.

Checks every verification result against what was asked; knows neither drafts' origin nor text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from betoken.router.workers.attached_draft import can_be
from betoken.router.workers.mailbox import Mailbox, Patience
from betoken.router.workers.verify_requests import NOTHING_GRANTED, Grant, Verification
from betoken.v1.types_pb2 import TokenLogprobs
from betoken.v1.verify_pb2 import DraftBlock, PromptLogprobs, Stale, VerificationResult

_SILENCE_CHECK_S = 0.1
"""From one question whether a silence is long enough to the next."""


class SequenceLostError(Exception):
    """The worker does not hold the sequence any more, or cannot be trusted with it; it has to be re-opened."""


class VerifyHost(Protocol):
    """The worker, as its sessions need it."""

    def send_block(self, block: DraftBlock) -> None:
        """Send an entry of a session that is open.

        Raises:
            SequenceLostError: the worker has just gone.
        """
        ...

    def close_session(self, session: VerifySession) -> None:
        """Free a session's sequence; idempotent."""
        ...

    def fell_silent(self) -> None:
        """A session lost its sequence because the worker showed no progress."""
        ...


@dataclass(frozen=True, slots=True)
class ResultLimits:
    """The conditions on every verification result of a sequence."""

    vocab_size: int
    has_logprobs: bool = False
    """Whether every token has to come with its logprobs."""
    num_prompt_logprobs: int = 0
    """Entries of the prompt's logprobs that have to come before the first result, the client's included."""
    max_attached: int = 0
    """Most draft tokens of a round that the worker's own drafter proposes; 0 = the sequence has none."""


class VerifySession:
    """The router's end of an open sequence."""

    __slots__ = (
        *("_host", "_is_pending", "_limits", "_mailbox", "_on_pending", "_timeout_s"),
        *("granted", "num_received_logprobs", "sequence_id"),
    )

    def __init__(
        self,
        sequence_id: int,
        host: VerifyHost,
        limits: ResultLimits,
        patience: Patience,
        timeout_s: float,
        on_pending: Callable[[], None] = lambda: None,
        num_received_logprobs: int = 0,
    ) -> None:
        """`timeout_s`: longest wait for a result without a sign of work; `on_pending`: called when the worker says
        that what was asked still waits for its turn; `num_received_logprobs`: entries of the prompt's logprobs that the
        worker does not report it."""
        self.sequence_id = sequence_id
        self.granted: Grant = NOTHING_GRANTED
        """The newest grant. Its end is the furthest of all: a shorter grant does not shorten earlier ones."""
        self._host = host
        self._limits = limits
        self._timeout_s = timeout_s
        self._on_pending = on_pending
        self._is_pending = False
        self.num_received_logprobs = num_received_logprobs
        """Entries of the prompt's logprobs received so far."""
        self._mailbox: Mailbox[VerificationResult | Stale | PromptLogprobs] = Mailbox(patience)

    @property
    def can_attach(self) -> bool:
        """Whether the worker drafts for this sequence itself, as far as grants say so."""
        return self._limits.max_attached > 0

    @property
    def has_pending_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are to come before all else."""
        return self.num_received_logprobs < self._limits.num_prompt_logprobs

    async def next_of_prompt(self, is_enough: Callable[[float], bool] | None = None) -> PromptLogprobs:
        """The next logprobs of the prompt; the session owes some. Raises and `is_enough` as `next_granted`."""
        part = await self._answer(is_enough)
        num_left = self._limits.num_prompt_logprobs - self.num_received_logprobs
        if (
            not isinstance(part, PromptLogprobs)
            or part.first_position != self.num_received_logprobs + 1
            or not 1 <= len(part.logprobs) <= num_left
            or not _are_sound(part.logprobs)
        ):
            raise SequenceLostError(f"{num_left} of the prompt's logprobs are owed, which do not come")
        self.num_received_logprobs += len(part.logprobs)
        return part

    async def verify(self, asked: Verification) -> VerificationResult:
        """The target's verification result on a draft; no grant may be running.

        Raises:
            SequenceLostError: re-open the sequence.
            BetokenError: the worker refused the sequence for good.
        """
        self._host.send_block(asked.block(self.sequence_id))
        result = await self._result(asked.base_length)
        return self._checked(result, asked.base_length, asked.is_answered_by(result))

    def grant(self, grant: Grant) -> None:
        """Let the worker decode alone. Raises as `verify`."""
        num_tokens = max(grant.end, self.granted.end) - grant.base_length
        self.granted = grant = replace(grant, num_tokens=num_tokens)
        block = grant.block(self.sequence_id)
        block.num_draft_tokens = min(grant.num_draft_tokens, self._limits.max_attached)
        self._host.send_block(block)

    async def next_granted(
        self, base_length: int, is_enough: Callable[[float], bool] | None = None
    ) -> VerificationResult:
        """The next step under a grant. Raises as `verify`.

        `is_enough`: called periodically: whether so many seconds without progress suffice, even fewer than usual.
        """
        result = await self._result(base_length, is_enough)
        if result.HasField("attached"):
            is_step = can_be(result, self._limits.vocab_size, self._limits.max_attached)
        else:
            is_step = result.num_accepted == result.num_draft_tokens == 0
        return self._checked(result, base_length, is_step)

    def close(self) -> None:
        """Free the sequence on the worker; idempotent."""
        self._host.close_session(self)

    def deliver(self, answer: VerificationResult | Stale | PromptLogprobs) -> None:
        """An answer came from the link."""
        self._mailbox.put(answer)

    def pending(self) -> None:
        """The worker is at work and the sequence's turn will come: its wait begins anew."""
        self._is_pending = True
        self._on_pending()

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        self._mailbox.fail(error)

    async def _result(self, base_length: int, is_enough: Callable[[float], bool] | None = None) -> VerificationResult:
        """The next answer, which has to be a verification result."""
        answer = await self._answer(is_enough)
        if isinstance(answer, Stale):
            raise SequenceLostError(f"block at {base_length} is stale: the worker is at {answer.length}")
        if isinstance(answer, PromptLogprobs):
            raise SequenceLostError("unexpected logprobs of a prompt")
        return answer

    async def _answer(self, is_enough: Callable[[float], bool] | None) -> VerificationResult | Stale | PromptLogprobs:
        """The next answer."""
        wait_s = self._timeout_s if is_enough is None else min(_SILENCE_CHECK_S, self._timeout_s)
        since_s = time.monotonic()
        while True:
            self._is_pending = False
            try:
                return await self._mailbox.get(wait_s)
            except TimeoutError:
                now_s = time.monotonic()
                if self._is_pending:
                    since_s = now_s  # re-opened, it would have its prompt computed again, behind all others
                silent_s = now_s - since_s
                if silent_s >= self._timeout_s or (is_enough is not None and is_enough(silent_s)):
                    self._host.fell_silent()
                    raise SequenceLostError(f"no verification result within {round(silent_s, 1):g} s") from None

    def _checked(self, result: VerificationResult, base_length: int, is_of_request: bool) -> VerificationResult:
        """The verification result, if it can be one on what was asked."""
        limits = self._limits
        if (
            result.base_length != base_length
            or not is_of_request
            or result.next_id >= limits.vocab_size
            or (not _are_logprobs(result) if limits.has_logprobs else result.logprobs)
        ):
            raise SequenceLostError(f"a verification result that cannot be at {base_length}: {_brief(result)}")
        return result


def _are_logprobs(result: VerificationResult) -> bool:
    """True if every emitted token has well-formed logprobs."""
    return len(result.logprobs) == result.num_accepted + 1 and _are_sound(result.logprobs)


def _are_sound(logprobs: Iterable[TokenLogprobs]) -> bool:
    """True if each has its likeliest ids with their logprobs, and all are numbers."""
    return all(
        len(entry.top_ids) == len(entry.top_logprobs) and not any(map(math.isnan, (entry.logprob, *entry.top_logprobs)))
        for entry in logprobs
    )


def _brief(result: VerificationResult) -> str:
    path = f" along {len(result.path)} nodes" if result.path else ""
    return (
        f"base {result.base_length}, accepted {result.num_accepted} of {result.num_draft_tokens}{path}, "
        f"next id {result.next_id}"
    )
