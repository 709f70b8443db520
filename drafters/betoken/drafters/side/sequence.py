"""State of one sequence in an attached drafter that runs layers, and tokens of a pass. Knows no layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.side.context import LayerContext
from betoken.engine.batch import Segment


@dataclass(slots=True, eq=False)
class SideSequence:
    """An open sequence."""

    draft: DraftSequence
    settings: Any
    """Settings of the sequence, of the drafter's type."""
    context: LayerContext
    last: tuple[list[int], list[int], list[float]] | None = None
    """Ids, parents and shares of the last draft, until its verification result is known."""


@dataclass(slots=True, eq=False)
class SideDraft:
    """A draft under way."""

    owner: SideSequence


class Part(NamedTuple):
    """Rows of one sequence in a pass."""

    segment: Segment
    hidden: Tensor
