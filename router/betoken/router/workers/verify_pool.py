"""The verify workers: which fit together, and which is least loaded.

Knows links; knows nothing of sessions, drafts, text or clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from betoken.common.errors import FailedPreconditionError, LoadingError, UnavailableError
from betoken.router.request.worker_identity import ServedModel, WorkerIdentity
from betoken.router.workers.handshakes import Handshakes
from betoken.router.workers.verify_worker import VerifyWorker
from betoken.router.workers.worker import WorkerOptions
from betoken.router.workers.worker_pool import WorkerPool
from betoken.v1.types_pb2 import WorkerHello

_log = logging.getLogger(__name__)


class VerifyPool(WorkerPool[VerifyWorker]):
    """All verify workers of this router."""

    def __init__(
        self,
        addresses: Sequence[str],
        options: WorkerOptions,
        verify_timeout_s: float,
        handshakes: Handshakes,
        *,
        allow_weights_change: bool = False,
    ) -> None:
        """Subscribers are called after each change of capacity. `allow_weights_change`: whether workers with other
        weights may replace workers that are gone."""
        super().__init__(
            VerifyWorker(address, options, verify_timeout_s, self.check, self.changed) for address in addresses
        )
        self.model: ServedModel | None = None
        """Model of the last accepted worker."""
        self._allow_weights_change = allow_weights_change
        self._handshakes = handshakes
        self._changed = asyncio.Event()

    @property
    def capacity(self) -> int:
        """Sequences that the workers which get new ones hold at once."""
        return sum(worker.hello.max_sequences for worker in self._in_use())

    def _check_loading(self) -> None:
        """Raises:
        LoadingError: no worker is ready, and one of them loads.
        """
        errors = [worker.link.loading for worker in self.workers if worker.link.loading is not None]
        if errors:
            furthest = max(errors, key=lambda error: error.fraction)
            raise LoadingError(furthest.stage, furthest.fraction)

    def check(self, hello: WorkerHello, candidate: VerifyWorker) -> None:
        """Accept a worker's handshake.

        Raises:
            FailedPreconditionError: it would not give the same tokens as the workers that are ready.
        """
        model = self._handshakes.check_verify(hello)
        theirs = model.identity
        for worker in self.workers:
            if worker is candidate or not worker.is_ready:
                continue
            if (ours := worker.identity) != theirs:
                theirs_not_ours, ours_not_theirs = theirs.difference(ours), ours.difference(theirs)
                raise FailedPreconditionError(
                    f"this worker serves {theirs_not_ours}; {worker.link.address} serves {ours_not_theirs}"
                )
        self._check_pinned_weights(theirs)
        if self.model is None or model.identity != self.model.identity:
            _log_eos(model)
        self.model = model

    def _check_pinned_weights(self, identity: WorkerIdentity) -> None:
        """Reject weights that differ from the first accepted worker's, unless the operator allows a change."""
        if self.model is None or self._allow_weights_change:
            return
        pinned, found = self.model.identity.weights_fingerprint, identity.weights_fingerprint
        if found != pinned:
            raise FailedPreconditionError(
                f"this router serves weights {pinned or 'without a fingerprint'}, this worker has {found or 'none'};"
                " restart the router, or start it with --allow-weights-change"
            )

    def serves(self, model_id: str) -> bool:
        """Whether `model` goes by this id: workers that give the same answers may have loaded it under several."""
        if self.model is None:
            return False
        known = (worker for worker in self.workers if worker.link.hello is not None)
        return any(w.hello.model_id == model_id and w.identity == self.model.identity for w in known)

    def changed(self) -> None:
        """Wake all requests that wait for a worker, after one connected or disconnected."""
        self._changed.set()
        self._changed = asyncio.Event()
        for worker in self.workers:
            worker.link.dial_soon()  # a rejected worker may match now
        self._notify()

    def least_loaded(
        self, identity: WorkerIdentity | None = None, avoid: VerifyWorker | None = None
    ) -> VerifyWorker | None:
        """The ready worker with most room, of the given identity if one is given; None if there is none.

        A silent worker only if no other is ready, not even `avoid`.
        """
        fitting = [
            worker
            for worker in self._in_use()
            if worker is not avoid and (identity is None or worker.identity == identity)
        ]
        # Of workers that seem full, one has just got room and not reported it: admission counted on it.
        return min(fitting, key=lambda worker: (worker.load_factor, worker.own_load_factor), default=None)

    async def wait_ready(self, timeout_s: float, identity: WorkerIdentity | None = None) -> VerifyWorker:
        """The least loaded ready worker, as soon as there is one.

        Raises:
            UnavailableError: none became ready in time, or workers of another identity did, which keep them away.
            LoadingError: the first one loads, for a request that needs no identity yet.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (worker := self.least_loaded(identity)) is None:
                    if self.model is None:
                        self._check_loading()
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
        """The ready workers, without silent ones unless all are silent."""
        ready = [worker for worker in self.workers if worker.is_ready]
        return [worker for worker in ready if not worker.is_silent] or ready

    async def run(self) -> None:
        """Keep all links until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(worker.link.run())


def _log_eos(model: ServedModel) -> None:
    own = model.identity.eos_token_ids
    if added := model.eos_token_ids[len(own) :]:
        _log.info(
            "%s: its EOS ids %s lack the eos_token of the tokenizer, which has a chat template: id %d ends answers too",
            model.hello.model_id,
            list(own),
            *added,
        )
