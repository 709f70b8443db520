"""A table of open sequences: rejections, ends of sequences, and notifications."""

from dataclasses import dataclass

import pytest
from opentelemetry.trace import INVALID_SPAN, Span

from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
)
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.commands import Close, CloseLink, TellLoad
from betoken.rpc.link.sequence_table import SequenceTable
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad


@dataclass
class Kept:
    """A sequence, and the command that opens it."""

    key: SequenceKey
    deadline_s: float | None = None
    span: Span = INVALID_SPAN
    pending_since_ns: int | None = None


class Owner:
    """Core and sink in one, which record their calls."""

    def __init__(self, max_sequences: int = 3) -> None:
        self.fast_wake = FastWake()
        self.fault: Exception | None = None
        self.let_go_keys: list[SequenceKey] = []
        self.failures: dict[SequenceKey, BetokenError] = {}
        self.loads: list[int] = []
        self.pendings: list[list[SequenceKey]] = []
        self.table: SequenceTable[Kept, Kept] = SequenceTable(self, self, max_sequences, self.fast_wake)

    def take_in(self, opening: Kept) -> Kept:
        if self.fault is not None:
            raise self.fault
        return opening

    def let_go(self, sequence: Kept) -> None:
        self.let_go_keys.append(sequence.key)

    def load(self) -> WorkerLoad:
        return WorkerLoad(len(self.table), 0, 0, 0)

    def pending(self, keys: list[SequenceKey]) -> None:
        self.pendings.append(keys)

    def failed(self, key: SequenceKey, error: BetokenError) -> None:
        self.failures[key] = error

    def load_changed(self, load: WorkerLoad) -> None:
        self.loads.append(load.num_running)


def test_a_second_open_ends_the_first_sequence():
    owner = Owner()
    owner.table.open(Kept((1, 1)))
    owner.table.open(Kept((1, 1)))
    assert isinstance(owner.failures[1, 1], FailedPreconditionError)
    assert owner.let_go_keys == [(1, 1)] and len(owner.table) == owner.fast_wake.num_held == 0


def test_the_number_of_open_sequences_is_bounded():
    owner = Owner(max_sequences=2)
    for n in range(3):
        owner.table.open(Kept((1, n)))
    assert list(owner.table) == [(1, 0), (1, 1)] and owner.table.num_opened == 2
    assert isinstance(owner.failures[1, 2], ResourceExhaustedError)
    assert owner.loads == [1, 2]


@pytest.mark.parametrize("fault", [NotFoundError("no such drafter"), ZeroDivisionError("an internal error")])
def test_a_sequence_that_the_owner_rejects_is_rejected_alone(fault):
    owner = Owner()
    owner.table.open(Kept((1, 1)))
    owner.fault = fault
    owner.table.open(Kept((1, 2)))
    assert list(owner.table) == [(1, 1)] and not owner.let_go_keys
    error = owner.failures[1, 2]
    assert error is fault or (isinstance(error, InternalError) and "bug" not in str(error))
    owner.table.check_integrity()


def test_commands_end_sequences_and_report_the_load():
    owner = Owner()
    for key in ((1, 1), (1, 2), (2, 1)):
        owner.table.open(Kept(key))
    owner.table.apply(Close((1, 9)))
    owner.table.apply(CloseLink(1))
    owner.table.apply(TellLoad())
    owner.table.apply(Close((2, 1)))
    assert owner.let_go_keys == [(1, 1), (1, 2), (2, 1)]
    assert owner.loads == [1, 2, 3, 2, 1, 1, 0] and not owner.failures


def test_a_command_for_a_closed_sequence_is_reported():
    owner = Owner()
    assert owner.table.find((1, 1)) is None
    assert isinstance(owner.failures[1, 1], NotFoundError)


def test_deadlines_end_sequences_in_time_and_the_next_one_is_reported():
    owner = Owner()
    for n, deadline_s in enumerate((5.0, None, 7.0)):
        owner.table.open(Kept((1, n), deadline_s))
    assert owner.table.expire(4.0) == 5.0
    assert owner.table.expire(5.0) == 7.0
    assert list(owner.table) == [(1, 1), (1, 2)] and owner.failures.keys() == {(1, 0)}
    assert isinstance(owner.failures[1, 0], DeadlineExceededError)
    assert owner.table.expire(8.0) is None


def test_long_waits_of_sequences_are_reported_and_short_ones_are_not():
    owner = Owner()
    for n, since_ns in enumerate((0, 1 << 62, None)):
        owner.table.open(Kept((1, n), pending_since_ns=since_ns))
    owner.table.report_pending()
    owner.table.report_pending()
    assert owner.pendings == [[(1, 0)]], "once in an interval"
