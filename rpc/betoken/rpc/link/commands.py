"""Commands to any worker's core about its sequences, as values.

A handler translates the entries of a frame into commands; the core applies them in order before its next step. Commands
are immutable, so a run can be logged, replayed, or sent to several cores.
"""

from dataclasses import dataclass

from betoken.rpc.link.worker_load import SequenceKey


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a sequence; unknown ones are ignored."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Forget every sequence of a link that has ended."""

    link_id: int


@dataclass(frozen=True, slots=True)
class TellLoad:
    """Report the worker's load."""


TableCommand = Close | CloseLink | TellLoad
"""Commands that a `SequenceTable` applies."""
