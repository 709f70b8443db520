"""Hosts drafters for a worker: opens sequences in them, queues requests, checks drafts and contains faults.

A fault costs a request its draft and never a stream: the drafter reopens the sequence, or the sequence loses it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from betoken.common.errors import BetokenError, FailedPreconditionError, InternalError, InvalidArgumentError
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence, source_names
from betoken.drafters.host.ahead import has_ahead_work, step_ahead
from betoken.drafters.host.hosted import Answer, HostedSequence, Request
from betoken.drafters.registry import SPECS
from betoken.rpc.link.worker_load import SequenceKey

if TYPE_CHECKING:
    from betoken.drafters.host.feed import CommittedRows, FeatureFeed

logger = logging.getLogger(__name__)
_FAILED = "drafter %s failed"


class HostSink(Protocol):
    """Receives the results of a host; called by the thread that calls the host."""

    def drafted(self, answers: list[Answer]) -> None:
        """Finished requests of one step."""
        ...

    def lost(self, hosted: HostedSequence) -> None:
        """The drafter cannot reopen the sequence after a fault; its open requests are reported afterwards."""
        ...


class DrafterHost:
    """Drafters by name, and the sequences that are open in them."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        sink: HostSink,
        vocab_size: int | None = None,
        max_faults: int | None = None,
        feed: FeatureFeed | None = None,
    ) -> None:
        """Args:
        vocab_size: bound of draft ids; drafts above it, or longer than requested, are faults. None = unchecked.
        max_faults: consecutive faults after which a sequence loses its drafter; None = no limit.
        feed: passes hidden states to the drafters that read them.
        """
        self._drafters = dict(drafters)
        self._sink = sink
        self._vocab_size = vocab_size
        self._max_faults = max_faults
        self._feed = feed
        self._open: dict[SequenceKey, HostedSequence] = {}
        self._reach = {name: {name, *source_names(drafter)} for name, drafter in self._drafters.items()}
        """Names of the drafters that may work for a sequence, by the name of its drafter."""
        self._readers = [name for name in self._drafters if feed is not None and feed.reads(name)]
        self._first = [name for name in self._drafters if name in SPECS and SPECS[name].comes_first]

    @property
    def names(self) -> list[str]:
        """Names of the drafters, the default first."""
        return list(self._drafters)

    @property
    def has_sequences(self) -> bool:
        return bool(self._open)

    @property
    def has_work(self) -> bool:
        """Whether a drafter has something to do, such as computing a long prompt."""
        return any(self._has_work(name) for name in self._drafters)

    @property
    def has_ahead_work(self) -> bool:
        """Whether a drafter can draft ahead."""
        return any(map(has_ahead_work, self._drafters.values()))

    @property
    def drafters(self) -> Iterable[Drafter]:
        return self._drafters.values()

    def find(self, key: SequenceKey) -> HostedSequence | None:
        """The hosted sequence of this key; None without one."""
        return self._open.get(key)

    def open(self, sequence: DraftSequence, name: str) -> HostedSequence:
        """Open the sequence in the drafter of this name.

        Raises:
            InvalidArgumentError: the drafter is unknown, or rejects the sequence's settings.
            InternalError: the drafter failed.
        """
        if name not in self._drafters:
            raise InvalidArgumentError("drafter.name", name, "must be one of " + ", ".join(self._drafters))
        hosted = HostedSequence(sequence, name, self._drafters[name])
        try:
            hosted.drafter.open(sequence)
        except BetokenError:
            raise
        except Exception as error:
            logger.exception(_FAILED, name)
            raise InternalError("the drafter failed") from error
        self._open[sequence.key] = hosted
        return hosted

    def close(self, hosted: HostedSequence) -> None:
        """Forget the sequence and its requests."""
        self._open.pop(hosted.key, None)
        hosted.release()

    def reads_whole_text(self, hosted: HostedSequence) -> bool:
        """Whether a drafter of the sequence needs the features of all its positions."""
        feed, steers = self._feed, hosted.sequence.draft_affects_output
        return feed is not None and any(feed.reads_whole_text(name, steers) for name in self._reach[hosted.name])

    def commit(self, hosted: HostedSequence, ids: Sequence[int]) -> None:
        """Append ids that the target decided; the drafter receives them when it is not at work on the sequence."""
        if hosted.at_work is not None:
            hosted.late_ids += ids
            return
        hosted.sequence.commit(ids)
        try:
            hosted.drafter.commit(hosted.sequence, list(ids))
        except Exception:
            logger.exception(_FAILED, hosted.name)
            self._restart(hosted)

    def request(self, hosted: HostedSequence, request: Request) -> None:
        """Queue a request. Several may be open for a sequence, each with its own (base length, next id).

        Raises:
            FailedPreconditionError: a request with this key is open already.
        """
        length, next_id = hosted.tip
        if request.ahead_ids:
            length, next_id = length + len(request.ahead_ids), request.ahead_ids[-1]
        request.key = length, next_id
        if request.key in hosted.requests:
            raise FailedPreconditionError(f"a request for length {length} and next id {next_id} is still open")
        hosted.requests[request.key] = request
        if request.ahead_ids or hosted.at_work is None:
            self._deliver(self._start(hosted, request))

    def observe(self, committed: CommittedRows) -> None:
        """Pass the features of a forward to the drafters that read them, after its decisions were committed."""
        for hosted in self._open.values() if self._readers else ():
            is_read = hosted.at_work is not None and not hosted.views.keys().isdisjoint(self._readers)
            if is_read and (rows := committed.alone(hosted.key)) is not None:
                hosted.late_rows.append(rows)
        for name in self._readers:
            self._feed_rows(name, [hosted for hosted in self._open.values() if hosted.at_work is None], committed)

    def step(self) -> None:
        """Run one unit of work of every drafter and deliver the finished drafts; without work, draft ahead."""
        is_idle = not self.has_work and not self._waiting()
        for name in self._drafters:
            if self._has_work(name) or any(hosted.name == name for hosted in self._waiting()):
                self._deliver(self._step(name))
        self._end_forgotten()
        answers, failed = step_ahead(self._drafters, self._open) if is_idle else ([], [])
        self._deliver(answers)
        for hosted in [each for each in self._open.values() if not self._reach[each.name].isdisjoint(failed)]:
            self._restart(hosted)

    def reload(self, drafters: Mapping[str, Drafter]) -> None:
        """Replace drafters between two steps; their sequences are reopened, and open requests start again."""
        affected = [hosted for hosted in self._open.values() if not self._reach[hosted.name].isdisjoint(drafters)]
        for hosted in affected:
            hosted.release()
        self._drafters |= {name: drafter for name, drafter in drafters.items() if name in self._drafters}
        for drafter in self._drafters.values():
            if (sources := getattr(drafter, "sources", None)) is not None:
                sources |= {name: new for name, new in drafters.items() if name in sources}
        for hosted in affected:
            hosted.drafter, requests = self._drafters[hosted.name], list(hosted.requests.values())
            if hosted.reopen():
                for request in requests:
                    if request.started_ns and request.key in hosted.requests:
                        self._deliver(self._start(hosted, request))
            else:
                self._lose(hosted)

    def check_integrity(self) -> None:
        """Check the page accounting of the drafters; raises if it is wrong."""
        for drafter in self._drafters.values():
            drafter.check_integrity()

    def _deliver(self, answers: list[Answer]) -> None:
        if answers:
            self._sink.drafted(answers)

    def _start(self, hosted: HostedSequence, request: Request) -> list[Answer]:
        """Pass a request to the drafter; return answers that are complete at once."""
        request.started_ns = time.perf_counter_ns()
        sequence = hosted.sequence
        try:
            if request.ahead_ids:
                if request.branch is None:
                    request.branch = hosted.sequence.branched([*hosted.late_ids, *request.ahead_ids])
                sequence = request.branch
                hosted.drafter.open(sequence)
            else:
                hosted.at_work = request
            sequence.is_waiting, sequence.takes_trees, sequence.terms = True, request.takes_trees, None
            sequence.num_outcomes = request.num_outcomes
            for name in self._first:
                drafted = self._drafters[name].propose(sequence, request.max_tokens)  # type: ignore[attr-defined]
                if drafted.draft_ids:
                    return self._finish([drafted], name)
            sequence.terms = request.terms
            hosted.drafter.request(sequence, request.num_tokens)
        except Exception:
            logger.exception(_FAILED, hosted.name)
            return self._fail(hosted)
        return []

    def _step(self, name: str) -> list[Answer]:
        try:
            bool(self._drafters[name].has_work)  # raises if the drafter fails here
            return self._finish(list(self._drafters[name].step()), name)
        except Exception:
            logger.exception(_FAILED, name)
            failed = [hosted for hosted in self._waiting() if name in self._reach[hosted.name]]
            return [answer for hosted in failed for answer in self._fail(hosted)]

    def _finish(self, finished: Iterable[Drafted], name: str) -> list[Answer]:
        """End the requests of these drafts, made by the drafter `name`.

        Raises:
            ValueError: a draft that was not requested.
        """
        found = [(drafted, *self._requested(drafted)) for drafted in finished]
        if len({(hosted.key, request.key) for _, hosted, request in found}) < len(found):
            raise ValueError("two drafts for one request")
        answers: list[Answer] = []
        for drafted, hosted, request in found:
            if request.key not in hosted.requests:
                continue  # ended by a fault of the same sequence
            try:
                drafted.check()
                if self._vocab_size is not None:  # otherwise the receiver cuts what is too long
                    request.check(drafted, self._vocab_size)
            except Exception:
                logger.exception(_FAILED, name)
                answers += self._fail(hosted)
            else:
                hosted.num_faults = 0
                answers += self._end(hosted, request, drafted, name)
        return answers

    def _requested(self, drafted: Drafted) -> tuple[HostedSequence, Request]:
        hosted = self._open.get(drafted.sequence.key)
        request = None
        if hosted is not None:
            branch = drafted.sequence.branch
            request = hosted.at_work if branch is None else hosted.requests.get(branch)
        if hosted is None or request is None:
            raise ValueError("a draft that was not requested")
        return hosted, request

    def _end(self, hosted: HostedSequence, request: Request, drafted: Drafted, name: str) -> list[Answer]:
        """Answer a request, commit what was decided meanwhile, and start the next queued request."""
        del hosted.requests[request.key]
        sources = (name,) if drafted.sources is None else drafted.sources
        answers = [Answer(hosted, request, drafted, sources, time.perf_counter_ns() - request.started_ns)]
        if request.branch is not None:
            hosted.close_branch(request)
            return answers
        if late_ids := hosted.end_work():
            self.commit(hosted, late_ids)
        late, hosted.late_rows = hosted.late_rows, []
        for rows in late:
            for reader in self._readers:
                self._feed_rows(reader, [hosted], rows)
        return answers + self._start_queued(hosted) if hosted.requests else answers

    def _start_queued(self, hosted: HostedSequence) -> list[Answer]:
        """Start the queued request for the committed text; earlier ones are answered with empty drafts."""
        answers: list[Answer] = []
        for request in [request for request in hosted.requests.values() if not request.started_ns]:
            if request.key == hosted.tip:
                return answers + self._start(hosted, request)
            del hosted.requests[request.key]
            answers.append(Answer(hosted, request, Drafted(hosted.sequence, []), (hosted.name,), 0))
        return answers

    def _feed_rows(self, name: str, candidates: Iterable[HostedSequence], committed: CommittedRows) -> None:
        """Pass rows to the drafter `name`, for the candidates that it holds."""
        views = [(hosted, hosted.views.get(name)) for hosted in candidates if hosted.key in committed.rows]
        held = [(hosted, view) for hosted, view in views if view is not None]
        if not held or self._feed is None:
            return
        try:
            self._feed.send(name, self._drafters[name], [view for _, view in held], committed)
            for hosted, _ in held:
                hosted.num_unread = 0
        except Exception:
            logger.exception(_FAILED, name)
            for hosted, _ in held:
                hosted.num_unread += 1
                self._restart(hosted)

    def _waiting(self) -> list[HostedSequence]:
        return [hosted for hosted in self._open.values() if hosted.requests]

    def _has_work(self, name: str) -> bool:
        """Whether a drafter has work. If that fails, it has work while one of its sequences waits, so `step` fails."""
        try:
            return bool(self._drafters[name].has_work)
        except Exception:
            return any(hosted.name == name for hosted in self._waiting())

    def _end_forgotten(self) -> None:
        """End the requests that no drafter works on."""
        if waiting := self._waiting():
            busy = {name for name in self._drafters if self._has_work(name)}
            forgotten = [hosted for hosted in waiting if busy.isdisjoint(self._reach[hosted.name])]
            self._deliver([answer for hosted in forgotten for answer in self._fail(hosted)])

    def _fail(self, hosted: HostedSequence) -> list[Answer]:
        """Restart a sequence after a failed draft; its open requests get empty drafts."""
        hosted.num_faults += 1
        answers = hosted.fail_requests()
        self._restart(hosted)
        return answers

    def _restart(self, hosted: HostedSequence) -> None:
        """Reopen the sequence in its drafter; if that fails, or failed too often, it goes on without."""
        self._deliver(hosted.fail_requests())
        hosted.release()
        hosted.late_rows.clear()
        if late_ids := hosted.end_work():
            hosted.sequence.commit(late_ids)
        is_given_up = self._max_faults is not None and max(hosted.num_faults, hosted.num_unread) >= self._max_faults
        if is_given_up or not hosted.reopen():
            self._lose(hosted)

    def _lose(self, hosted: HostedSequence) -> None:
        """Forget a sequence that its drafter does not hold any more."""
        logger.warning("a sequence goes on without the drafter %s", hosted.name)
        self.close(hosted)
        self._sink.lost(hosted)
        self._deliver(hosted.fail_requests())
