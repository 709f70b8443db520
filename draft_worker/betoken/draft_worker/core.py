"""The draft worker's core: open sequences, each with its drafter, and the requests waiting for drafts.

Runs on the model thread. It knows no protobuf and no streams: results leave through a `DraftSink`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from opentelemetry.trace import Span

from betoken.common.errors import (
    BetokenError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
)
from betoken.draft_worker.commands import Commit, DraftCommand, Open, RequestDraft
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence
from betoken.engine.page_table import PageTable
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.sequence_table import SequenceTable, TableSink
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad

if TYPE_CHECKING:
    from betoken.engine.rules.grammar import GrammarRule
    from betoken.engine.rules.sequence_rules import SequenceRules

RulesOf: TypeAlias = "Callable[[DraftSequence, GrammarRule | None], SequenceRules]"
"""Makes the rules of a sequence, with what its constraint allows."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftAnswer:
    """A finished draft block of one sequence."""

    key: SequenceKey
    base_length: int
    drafted: Drafted
    drafter_name: str
    """Name of the drafter that was asked."""
    queue_ns: int
    forward_ns: int


@dataclass(slots=True)
class _Open:
    """An open sequence and its unanswered request."""

    sequence: DraftSequence
    drafter_name: str
    requested_ns: int | None = None
    """When its unanswered request arrived, `time.perf_counter_ns`; None without one."""
    started_ns: int = 0
    """When the drafter was asked, `time.perf_counter_ns`."""
    is_hosted: bool = True
    """Whether the drafter holds the sequence."""

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key

    @property
    def deadline_s(self) -> float | None:
        return self.sequence.deadline_s

    @property
    def span(self) -> Span:
        return self.sequence.span

    @property
    def pending_since_ns(self) -> int | None:
        return self.requested_ns


class DraftSink(TableSink, Protocol):
    """Where results go; called on the model thread."""

    def drafted(self, answers: list[DraftAnswer], load: Callable[[], WorkerLoad]) -> None:
        """Drafts that became complete; `load` gives how busy the worker is."""
        ...


class DraftCore:
    """Hosts drafters by name; the first is the default."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        page_tables: Sequence[PageTable],
        sink: DraftSink,
        max_sequences: int,
        fast_wake: FastWake | None = None,
        rules_of: RulesOf | None = None,
    ) -> None:
        """`fast_wake`: held while a sequence is open. `rules_of`: makes a sequence's rules; None = no model asks for
        them."""
        self._drafters = dict(drafters)
        self._default_drafter = next(iter(self._drafters))
        self._page_tables = page_tables
        self._sink = sink
        self._rules_of = rules_of
        self._sequences: SequenceTable[Open, _Open] = SequenceTable(self, sink, max_sequences, fast_wake)

    @property
    def has_work(self) -> bool:
        return any(self._has_work(name) for name in self._drafters)

    def apply(self, command: DraftCommand) -> None:
        """Do what a command says. A fault of its sequence closes that, and is told."""
        match command:
            case Commit():
                self._commit(command)
            case RequestDraft():
                self._request(command)
            case Open():
                self._sequences.open(command)
            case _:
                self._sequences.apply(command)

    def take_in(self, opening: Open) -> _Open:
        """A sequence in the hands of its drafter.

        Raises:
            InvalidArgumentError: there is no such drafter, or it refuses the sequence's settings.
            InternalError: the drafter failed.
        """
        name = opening.drafter or self._default_drafter
        if name not in self._drafters:
            raise InvalidArgumentError("drafter.name", name, "must be one of " + ", ".join(self._drafters))
        entry = _Open(self._sequence(opening), name)
        try:
            self._drafters[name].open(entry.sequence)
        except BetokenError:
            raise
        except Exception as error:
            logger.exception("drafter %s failed", name)
            raise InternalError("the drafter failed") from error
        return entry

    def let_go(self, entry: _Open) -> None:
        """Close a sequence in its drafter."""
        if entry.is_hosted:
            try:
                self._drafters[entry.drafter_name].close(entry.sequence)
            except Exception:
                logger.exception("drafter %s failed", entry.drafter_name)

    def expire(self, now_s: float) -> float | None:
        """Close what is past its deadline; return the next deadline (`time.monotonic`), None without one."""
        return self._sequences.expire(now_s)

    def step(self) -> None:
        """Let every drafter with work do one unit of it, and hand out what became complete."""
        for name, drafter in self._drafters.items():
            if not self._has_work(name):
                continue
            # Asked before the step: one that fails may forget what it had to do.
            idle = {other for other in self._drafters if not self._has_work(other)}
            try:
                # A list, whatever a plug-in makes of it.
                finished = self._checked(list(drafter.step()), name) if drafter.has_work else []
            except Exception:
                # A drafter that fails costs its sequences this round's drafts, never their streams. Its sequences are
                # its own and those of idle drafters that left the work to others.
                logger.exception("drafter %s failed", name)
                waiting = [entry for entry in self._sequences.values() if entry.requested_ns is not None]
                finished = self._abandon([entry for entry in waiting if entry.drafter_name in {name, *idle}])
            self._hand_out(finished)
        self._sequences.report_pending()

    def check_integrity(self) -> None:
        """Re-derive what is held for open sequences; raises when it is off."""
        for drafter in self._drafters.values():
            drafter.check_integrity()
        self._sequences.check_integrity()

    def _sequence(self, opening: Open) -> DraftSequence:
        sequence = DraftSequence(
            key=opening.key,
            params=opening.params,
            prompt_ids=opening.prompt_ids,
            output_ids=list(opening.output_ids),
            max_length=opening.max_length,
            settings=dict(opening.settings),
            deadline_s=opening.deadline_s,
            wants_probs=opening.wants_probs,
            draft_affects_output=opening.draft_affects_output,
            predicted_ids=opening.predicted_ids,
            span=opening.span,
        )
        if self._rules_of is not None:
            sequence.rules = self._rules_of(sequence, opening.grammar)
        return sequence

    def _commit(self, command: Commit) -> None:
        key, ids = command.key, list(command.ids)
        entry = self._sequences.get(key)
        if entry is None:
            return  # its error is on the way to the router
        seq = entry.sequence
        if command.base_length != len(seq.ids):
            message = f"commit.base_length = {command.base_length}: the committed length here is {len(seq.ids)}"
            self._sequences.fail(key, FailedPreconditionError(message))
        elif entry.requested_ns is not None:
            self._sequences.fail(key, FailedPreconditionError("a request of this sequence is still unanswered"))
        elif len(seq.ids) + len(ids) > seq.max_length:
            limit = f"must end within max_length = {seq.max_length}"
            self._sequences.fail(key, InvalidArgumentError("commit.ids", f"{len(ids)} ids", limit))
        else:
            seq.ids.extend(ids)
            seq.output_ids.extend(ids)
            if seq.rules is not None:
                seq.rules.commit(ids)
            try:
                self._drafters[entry.drafter_name].commit(seq, ids)
            except Exception:
                logger.exception("drafter %s failed", entry.drafter_name)
                self._restart(entry)

    def _request(self, command: RequestDraft) -> None:
        entry = self._sequences.find(command.key)
        if entry is None:
            return
        if entry.requested_ns is not None:
            error = FailedPreconditionError("a request of this sequence is still unanswered")
            self._sequences.fail(command.key, error)
        else:
            entry.requested_ns = command.arrived_ns
            entry.started_ns = time.perf_counter_ns()
            entry.sequence.is_waiting, entry.sequence.takes_trees = True, command.takes_trees
            # A length that follows the clock would make the tokens depend on it.
            entry.sequence.terms = None if entry.sequence.draft_affects_output else command.terms
            try:
                self._drafters[entry.drafter_name].request(entry.sequence, command.num_tokens)
            except Exception:
                logger.exception("drafter %s failed", entry.drafter_name)
                self._hand_out(self._abandon([entry]))

    def _has_work(self, name: str) -> bool:
        """Whether a drafter has something to do; one that cannot tell has if a sequence waits for it: `step` fails."""
        try:
            return bool(self._drafters[name].has_work)
        except Exception:
            entries = self._sequences.values()
            return any(entry.drafter_name == name and entry.requested_ns is not None for entry in entries)

    def _checked(self, finished: list[Drafted], name: str) -> list[Drafted]:
        """The drafts of a step; where one is none, its sequence is taken in afresh."""
        waiting = {key for key, entry in self._sequences.items() if entry.requested_ns is not None}
        checked = []
        for drafted in finished:
            key = drafted.sequence.key
            if key not in waiting:
                raise ValueError("a draft that nobody asked for")
            waiting.remove(key)
            try:
                drafted.check()
            except Exception:
                logger.exception("drafter %s failed", name)
                checked += self._abandon([self._sequences[key]])
            else:
                checked.append(drafted)
        return checked

    def _abandon(self, entries: list[_Open]) -> list[Drafted]:
        """Take waiting sequences in afresh, each answered with an empty draft."""
        return [Drafted(entry.sequence, []) for entry in entries if self._restart(entry)]

    def _restart(self, entry: _Open) -> bool:
        """Whether the drafter, after a fault, took the sequence in again; otherwise it is closed."""
        drafter = self._drafters[entry.drafter_name]
        entry.is_hosted = False
        try:
            drafter.close(entry.sequence)
            drafter.open(entry.sequence)
        except Exception:
            logger.exception("drafter %s cannot take its sequence again", entry.drafter_name)
            self._sequences.fail(entry.key, InternalError("the drafter failed"))
            return False
        entry.is_hosted = True
        return True

    def _hand_out(self, finished: list[Drafted]) -> None:
        if finished:
            self._sink.drafted([self._answer(drafted) for drafted in finished], self.load)

    def _answer(self, drafted: Drafted) -> DraftAnswer:
        seq = drafted.sequence
        entry = self._sequences[seq.key]
        assert entry.requested_ns is not None, "a drafter answered a request nobody made"
        now_ns = time.perf_counter_ns()
        answer = DraftAnswer(
            key=seq.key,
            base_length=len(seq.ids),
            drafted=drafted,
            drafter_name=entry.drafter_name,
            queue_ns=max(0, entry.started_ns - entry.requested_ns),
            forward_ns=now_ns - entry.started_ns,
        )
        entry.requested_ns, entry.sequence.is_waiting = None, False
        return answer

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        num_free = sum(table.num_free for table in self._page_tables)
        num_pages = sum(table.num_pages for table in self._page_tables)
        return WorkerLoad(len(self._sequences), 0, num_free, num_pages)
