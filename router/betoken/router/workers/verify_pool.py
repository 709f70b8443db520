"""The verify workers: which fit together, which is least loaded, and which sequence lives where.

Knows links and sessions; drafts, text and clients lie elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from betoken.common.errors import (
    BetokenError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from betoken.router.request import GenerationRequest, SequenceIds
from betoken.router.workers.mailbox import Patience
from betoken.router.workers.verify_session import SequenceLostError, VerifySession
from betoken.router.workers.worker import Worker
from betoken.router.workers.worker_identity import ServedModel, WorkerIdentity
from betoken.rpc.link import LinkCallbacks, LinkOptions, LinkState, VerifyLink
from betoken.rpc.validation import validate_frame
from betoken.v1.types_pb2 import DrafterChoice, SourceInfo, WorkerHello
from betoken.v1.verify_pb2 import DraftBlock, VerifyLinkResponse

_log = logging.getLogger(__name__)
_FULL_RETRY_AFTER_S = 1.0  # links carry no advice; other routers fill the worker too
SILENCE = "gives no sign of work: others get what is new"
_LOST = (UnavailableError, InternalError, NotFoundError, FailedPreconditionError)


class VerifyWorker(Worker[VerifySession]):
    """One verify worker and the sequences this router has on it."""

    def __init__(self, address: str, pool: VerifyPool, options: LinkOptions) -> None:
        callbacks = LinkCallbacks(self._take, self._up, self._down, lambda hello: pool.check(hello, self))
        super().__init__(VerifyLink(address, callbacks, options), f"verify worker {address}")
        self.identity: WorkerIdentity
        """Identity told in its handshake; set once it has been ready."""
        self.is_silent = False
        """Whether a sequence was lost here for want of any sign of work, and none has come since."""
        self._pool = pool

    @property
    def is_ready(self) -> bool:
        """Whether it takes new sequences."""
        return self.link.state is LinkState.READY

    @property
    def drafters(self) -> Sequence[str]:
        """Names of the drafters attached to it; those of its last handshake while it is away."""
        return tuple(self.link.hello.drafters) if self.link.hello is not None else ()

    def attached(self, request: GenerationRequest) -> DrafterChoice | None:
        """The request's drafter, if it is attached here."""
        choice = request.drafter
        return choice if choice is not None and choice.name and choice.name in self.hello.drafters else None

    def open(
        self, request: GenerationRequest, committed_ids: Sequence[int], on_pending: Callable[[], None] = lambda: None
    ) -> VerifySession:
        """Open, or re-open, the request's sequence here; `on_pending` is called while it waits for its turn.

        Raises:
            SequenceLostError: the worker has just gone.
        """
        sequence_id = self._pool.sequence_ids.next()
        attached = self.attached(request)
        session = VerifySession(
            sequence_id,
            self.hello.vocab_size,
            self._pool.verify_timeout_s,
            self._pool.patience,
            self._send_block,
            self._close,
            on_pending,
            lambda: self._set_silent(True),
            has_logprobs=request.sampling.HasField("logprobs"),
            max_attached=self.hello.max_draft_tokens if attached is not None else 0,
        )
        try:
            self.link.send(opens=[request.open_entry(sequence_id, committed_ids, attached)])
        except UnavailableError as error:
            raise SequenceLostError(str(error)) from error
        self._sessions[sequence_id] = session
        return session

    def _send_block(self, block: DraftBlock) -> None:
        if block.sequence_id in self._sessions:  # otherwise the session has its error already
            try:
                self.link.send(blocks=[block])
            except UnavailableError as error:
                raise SequenceLostError(str(error)) from error

    def _take(self, _link: Any, frame: VerifyLinkResponse) -> None:
        validate_frame(frame.verdicts, frame.stales, frame.errors, frame.pending_ids)
        if frame.HasField("drain"):
            self._pool.changed()
        if self.is_silent and (frame.verdicts or frame.stales or frame.pending_ids or frame.HasField("load")):
            self._set_silent(False)  # a load follows the close of what was lost, so that an idle one comes back as well
        self._deliver(frame.verdicts)
        self._deliver(frame.stales)
        self._note_pending(frame.pending_ids)
        self._take_errors(frame.errors, _for_session)

    def _up(self, _link: Any) -> None:
        self.identity = WorkerIdentity.of(self.hello)
        self.is_silent = False
        self._pool.changed()

    def _down(self, _link: Any, why: BetokenError) -> None:
        self._lose_sessions(SequenceLostError(f"verify worker {self.link.address} went away: {why}"))
        self._pool.changed()

    def _set_silent(self, is_silent: bool) -> None:
        if is_silent != self.is_silent:
            _log.warning("verify worker %s %s", self.link.address, SILENCE if is_silent else "works again")
            self.is_silent = is_silent
            self._pool.changed()


class VerifyPool:
    """All verify workers of this router."""

    def __init__(
        self,
        addresses: Sequence[str],
        check_hello: Callable[[WorkerHello], None],
        text_fingerprint: str,
        chat_eos_id: int | None,
        sequence_ids: SequenceIds,
        patience: Patience,
        verify_timeout_s: float,
        options: LinkOptions,
        on_change: Callable[[], None],
    ) -> None:
        """`check_hello` raises for workers that do not fit the tokenizer, `text_fingerprint` and `chat_eos_id` are the
        tokenizer's; `on_change` follows changes of capacity."""
        self.sequence_ids = sequence_ids
        self.patience = patience
        self.verify_timeout_s = verify_timeout_s
        self.model: ServedModel | None = None
        """Model of the last accepted worker."""
        self.workers = [VerifyWorker(address, self, options) for address in addresses]
        self._check_hello = check_hello
        self._text_fingerprint, self._chat_eos_id = text_fingerprint, chat_eos_id
        self._on_change = on_change
        self._changed = asyncio.Event()

    @property
    def capacity(self) -> int:
        """Sequences that the workers which get new ones hold at once."""
        return sum(worker.hello.max_sequences for worker in self._in_use())

    @property
    def known_drafters(self) -> list[str]:
        """Names attached to any worker this router has met, in order of the workers."""
        return list(dict.fromkeys(name for worker in self.workers for name in worker.drafters))

    @property
    def ready_drafters(self) -> list[str]:
        """Names that can be had right now."""
        return list(dict.fromkeys(name for worker in self.workers if worker.is_ready for name in worker.drafters))

    @property
    def sources(self) -> list[SourceInfo]:
        """The sources of attached drafters' tokens, of every worker this router has met."""
        return [s for worker in self.workers if worker.link.hello is not None for s in worker.link.hello.sources]

    def check(self, hello: WorkerHello, candidate: VerifyWorker) -> None:
        """Accept a worker's handshake.

        Raises:
            FailedPreconditionError: it would not give the same tokens as the workers that are ready.
        """
        self._check_hello(hello)
        model = ServedModel.of(hello, self._text_fingerprint, self._chat_eos_id)
        theirs = model.identity
        for worker in self.workers:
            if worker is candidate or not worker.is_ready:
                continue
            if (ours := worker.identity) != theirs:
                theirs_not_ours, ours_not_theirs = theirs.difference(ours), ours.difference(theirs)
                raise FailedPreconditionError(
                    f"this worker serves {theirs_not_ours}; {worker.link.address} serves {ours_not_theirs}"
                )
        if self.model is None or model.identity != self.model.identity:
            _tell_eos(model)
        self.model = model

    def serves(self, model_id: str) -> bool:
        """Whether `model` goes by this id: workers that give the same answers may have loaded it under several."""
        if self.model is None:
            return False
        known = (worker for worker in self.workers if worker.link.hello is not None)
        return any(w.hello.model_id == model_id and w.identity == self.model.identity for w in known)

    def changed(self) -> None:
        """A worker came or went: wake everyone who waits for one."""
        self._changed.set()
        self._changed = asyncio.Event()
        for worker in self.workers:
            worker.link.dial_soon()  # one that was refused may fit now
        self._on_change()

    def least_loaded(
        self, identity: WorkerIdentity | None = None, avoid: VerifyWorker | None = None
    ) -> VerifyWorker | None:
        """The ready worker with most room, of the given identity if one is given; None if there is none.

        One that is silent only where no other is ready, not even `avoid`.
        """
        fitting = [
            worker
            for worker in self._in_use()
            if worker is not avoid and (identity is None or worker.identity == identity)
        ]
        # Of workers that seem full, one has just got room and not said so yet: the one that admission counted on.
        return min(fitting, key=lambda worker: (worker.load_factor, worker.own_load_factor), default=None)

    async def wait_ready(self, timeout_s: float, identity: WorkerIdentity | None = None) -> VerifyWorker:
        """The least loaded ready worker, as soon as there is one.

        Raises:
            UnavailableError: none became ready in time, or workers of another identity did, which keep them away.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (worker := self.least_loaded(identity)) is None:
                    if identity is not None and (other := self.least_loaded()) is not None:
                        raise UnavailableError(
                            "the verify workers of this request are gone",
                            places=f"{other.link.address} now serves {other.identity.difference(identity)}",
                        )
                    await self._changed.wait()
                return worker
        except TimeoutError:
            raise self.none_ready(timeout_s) from None

    def none_ready(self, waited_s: float) -> UnavailableError:
        """The error's text after a number of seconds without a worker."""
        details = "; ".join(f"{w.link.address}: {w.link.state} {w.link.detail}" for w in self.workers)
        return UnavailableError(f"no verify worker became ready within {round(waited_s, 1):g} s", places=details)

    def _in_use(self) -> list[VerifyWorker]:
        """The ready workers, without those that are silent unless all are."""
        ready = [worker for worker in self.workers if worker.is_ready]
        return [worker for worker in ready if not worker.is_silent] or ready

    async def run(self) -> None:
        """Keep all links until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(worker.link.run())

    async def close(self) -> None:
        """Drain and close all links."""
        await asyncio.gather(*(worker.link.close() for worker in self.workers))


def _for_session(error: BetokenError) -> Exception:
    if isinstance(error, _LOST):
        lost = SequenceLostError(str(error))
        lost.__cause__ = error
        return lost
    if isinstance(error, ResourceExhaustedError):
        return ResourceExhaustedError(str(error), retry_after_s=_FULL_RETRY_AFTER_S)
    return error


def _tell_eos(model: ServedModel) -> None:
    own = model.identity.eos_token_ids
    if added := model.eos_token_ids[len(own) :]:
        _log.info(
            "%s: its EOS ids %s lack the eos_token of the tokenizer, which has a chat template: id %d ends answers too",
            model.hello.model_id,
            list(own),
            *added,
        )
