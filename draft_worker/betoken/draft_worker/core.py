"""The draft worker's core: the table of open sequences in front of a drafter host.

Runs on the model thread. It knows no protobuf and no streams: results leave through a `DraftSink`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from betoken.common.errors import BetokenError, InternalError
from betoken.draft_worker.commands import Commit, DraftCommand, Open, RequestDraft
from betoken.drafters.drafter import Drafter, memory_counts
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import Answer, HostedSequence
from betoken.engine.page_table import PageTable
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.sequence_table import SequenceTable, TableSink
from betoken.rpc.link.worker_load import WorkerLoad

if TYPE_CHECKING:
    from betoken.draft_worker.rules import RulesOf


class DraftSink(TableSink, Protocol):
    """Where results go; called on the model thread."""

    def drafted(self, answers: list[Answer], load: Callable[[], WorkerLoad]) -> None:
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
        """`fast_wake`: held while a sequence is open. `rules_of`: None = no model needs rules."""
        self.host = DrafterHost(drafters, self)
        self._page_tables = page_tables
        self._sink = sink
        self._rules_of = rules_of
        self._sequences: SequenceTable[Open, HostedSequence] = SequenceTable(self, sink, max_sequences, fast_wake)

    @property
    def has_work(self) -> bool:
        return self.host.has_work or self.host.has_ahead_work

    def apply(self, command: DraftCommand) -> None:
        """Execute a command. A fault of its sequence closes the sequence and is reported."""
        match command:
            case Commit() | RequestDraft():
                self._run(command)
            case Open():
                self._sequences.open(command)
            case _:
                self._sequences.apply(command)

    def take_in(self, opening: Open) -> HostedSequence:
        """See `SequenceOwner` and `DrafterHost.open`."""
        sequence = opening.to_sequence()
        if self._rules_of is not None:
            sequence.rules = self._rules_of(sequence, opening.grammar)
        return self.host.open(sequence, opening.drafter or self.host.names[0])

    def let_go(self, entry: HostedSequence) -> None:
        """See `SequenceOwner`."""
        self.host.close(entry)

    def expire(self, now_s: float) -> float | None:
        """See `SequenceTable.expire`."""
        return self._sequences.expire(now_s)

    def step(self) -> None:
        """Run one unit of work of every drafter and send the finished drafts; without work, draft ahead."""
        self.host.step()
        self._sequences.report_pending()

    def drafted(self, answers: list[Answer]) -> None:
        """See `HostSink`."""
        if kept := [answer for answer in answers if answer.key in self._sequences]:
            self._sink.drafted(kept, self.load)

    def lost(self, hosted: HostedSequence) -> None:
        """See `HostSink`."""
        self._sequences.fail(hosted.key, InternalError("the drafter failed"))

    def check_integrity(self) -> None:
        """Check the accounting of drafters and open sequences; raises if it is wrong."""
        self.host.check_integrity()
        self._sequences.check_integrity()

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        num_free = sum(table.num_free for table in self._page_tables)
        num_pages = sum(table.num_pages for table in self._page_tables)
        return WorkerLoad(len(self._sequences), 0, num_free, num_pages, memory=memory_counts(self.host.drafters))

    def _run(self, command: Commit | RequestDraft) -> None:
        # If a commit's sequence is unknown, its error is on the way to the router.
        is_commit = isinstance(command, Commit)
        entry = self._sequences.get(command.key) if is_commit else self._sequences.find(command.key)
        if entry is not None:
            try:
                command.run(self.host, entry)
            except BetokenError as error:
                self._sequences.fail(command.key, error)
