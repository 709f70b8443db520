"""One verify worker: opens sequences there, hands out what comes back, and notices when it falls silent.

Knows its link and its sessions; knows nothing of other workers, drafts or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from betoken.common.economy.means import DecayedMean
from betoken.common.errors import (
    BetokenError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from betoken.common.step_times import ForwardTimes, StepTimes
from betoken.router.policy.draft_terms import forward_times
from betoken.router.request.generation import GenerationRequest
from betoken.router.request.worker_identity import WorkerIdentity
from betoken.router.workers.verify_session import ResultLimits, SequenceLostError, VerifySession
from betoken.router.workers.worker import Worker, WorkerOptions
from betoken.rpc.link import LinkCallbacks, VerifyLink
from betoken.rpc.validation import validate_frame
from betoken.v1.types_pb2 import DrafterChoice, Load, WorkerHello
from betoken.v1.verify_pb2 import DraftBlock, VerifyLinkResponse

_log = logging.getLogger(__name__)
_FORWARD_DECAY = 0.95
_FULL_RETRY_AFTER_S = 1.0  # links carry no advice; other routers fill the worker too
SILENCE = "gives no sign of work: others get what is new"
_LOST = (UnavailableError, InternalError, NotFoundError, FailedPreconditionError)


class VerifyWorker(Worker[VerifySession]):
    """One verify worker and the sequences this router has on it."""

    def __init__(
        self,
        address: str,
        options: WorkerOptions,
        verify_timeout_s: float,
        check_hello: Callable[[WorkerHello, VerifyWorker], None],
        on_change: Callable[[], None],
    ) -> None:
        """`check_hello` raises for a worker that does not fit; `on_change` follows changes of what it takes."""
        callbacks = LinkCallbacks(self._take, self._up, self._down, lambda hello: check_hello(hello, self), on_change)
        super().__init__(VerifyLink(address, callbacks, options.link), options)
        self.identity: WorkerIdentity
        """Identity from its handshake; set once it has been ready."""
        self.is_silent = False
        """Whether a sequence was lost because the worker showed no progress, and it has shown none since."""
        self.forward_s = DecayedMean(_FORWARD_DECAY)
        """Time of its recent forwards without prefill, seconds."""
        self._step_times = StepTimes(())
        self._times_at: tuple[Load | None, ForwardTimes] | None = None
        """The last load and its forward times; one load serves the sequences of a step."""
        self._verify_timeout_s = verify_timeout_s
        self._on_change = on_change

    @property
    def forward_times(self) -> ForwardTimes:
        """Times of its forwards at its present load."""
        load = self.link.load
        if self._times_at is None or self._times_at[0] is not load:
            self._times_at = load, forward_times(self._step_times, load)
        return self._times_at[1]

    def _attached(self, request: GenerationRequest) -> DrafterChoice | None:
        """The request's drafter, if it is attached here."""
        choice = request.drafter
        return choice if choice is not None and choice.name and choice.name in self.hello.drafters else None

    def open(
        self,
        request: GenerationRequest,
        committed_ids: Sequence[int],
        num_received_logprobs: int = 0,
        on_pending: Callable[[], None] = lambda: None,
    ) -> VerifySession:
        """Open or reopen the request's sequence here; `num_received_logprobs` entries of the prompt's logprobs are not
        sent again; `on_pending` is called while it waits for its turn.

        Raises:
            SequenceLostError: the worker has just gone.
        """
        attached = self._attached(request)
        can_attach = attached is not None or (request.is_auto and bool(self.hello.drafters))
        session = VerifySession(
            self._options.sequence_ids.next(),
            self,
            ResultLimits(
                self.hello.vocab_size,
                has_logprobs=request.sampling.HasField("logprobs"),
                num_prompt_logprobs=request.num_prompt_logprobs,
                max_attached=self.hello.max_draft_tokens if can_attach else 0,
            ),
            self._options.patience,
            self._verify_timeout_s,
            on_pending,
            num_received_logprobs,
        )
        try:
            predicting = self.hello.predicting_drafters
            is_predicting = bool(predicting) if attached is None else attached.name in predicting
            entry = request.open_entry(
                session.sequence_id,
                committed_ids,
                attached,
                is_predicting=can_attach and is_predicting,
                num_received_logprobs=num_received_logprobs,
            )
            self.link.send(opens=[entry])
        except UnavailableError as error:
            raise SequenceLostError(str(error)) from error
        self._sessions[session.sequence_id] = session
        return session

    def send_block(self, block: DraftBlock) -> None:
        """Send an entry of a session that is open.

        Raises:
            SequenceLostError: the worker has just gone.
        """
        if block.sequence_id in self._sessions:  # otherwise the session has its error already
            try:
                self.link.send(blocks=[block])
            except UnavailableError as error:
                raise SequenceLostError(str(error)) from error

    def _take(self, frame: VerifyLinkResponse) -> None:
        validate_frame(frame.results, frame.stales, frame.errors, frame.pending_ids, frame.prompt_logprobs)
        if frame.HasField("drain"):
            self._on_change()
        answers = (*frame.prompt_logprobs, *frame.results, *frame.stales)
        if self.is_silent and (answers or frame.pending_ids or frame.HasField("load")):
            self._set_silent(False)  # a load follows the close of what was lost, so that an idle one comes back as well
        self._deliver(answers)
        self._note_pending(frame.pending_ids)
        self._take_errors(frame.errors, _for_session)

    def _up(
        self,
    ) -> None:
        self.identity = WorkerIdentity.of(self.hello)
        context = max((cost.context for cost in self.hello.step_costs), default=0)
        points = [(cost.rows, cost.ns) for cost in self.hello.step_costs if cost.context == context]
        self._step_times, self._times_at = StepTimes(points), None
        self.is_silent = False
        self._on_change()

    def _down(self, why: BetokenError) -> None:
        self._lose_sessions(SequenceLostError(f"verify worker {self.link.address} went away: {why}"))
        self._on_change()

    def fell_silent(self) -> None:
        """A session lost its sequence because the worker showed no progress."""
        self._set_silent(True)

    def _set_silent(self, is_silent: bool) -> None:
        if is_silent != self.is_silent:
            _log.warning("verify worker %s %s", self.link.address, SILENCE if is_silent else "works again")
            self.is_silent = is_silent
            self._on_change()


def _for_session(error: BetokenError) -> Exception:
    if isinstance(error, _LOST):
        lost = SequenceLostError(str(error))
        lost.__cause__ = error
        return lost
    if isinstance(error, ResourceExhaustedError):
        return ResourceExhaustedError(str(error), retry_after_s=_FULL_RETRY_AFTER_S)
    return error
