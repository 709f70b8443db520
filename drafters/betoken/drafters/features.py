"""Interface to the target's hidden states: a drafter names layers and receives the rows of committed tokens.

A drafter states `FeatureNeeds` in its `DrafterSpec` and has the method of `FeatureReader`. Only drafters attached to a
verify worker can. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from betoken.drafters.drafter import Drafter, DraftSequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """Committed rows of one sequence, sent after the `commit` of the same forward."""

    sequence: DraftSequence
    first_position: int
    """Position of the first row. The row of position p was computed from `sequence.ids[: p + 1]` and says what follows
    them; the last row belongs to position len(ids) - 2, whose successor ids[-1] the target has chosen already."""
    first_row: int
    """Its place among the features of the call."""
    num_rows: int

    @property
    def rows(self) -> slice:
        """Places of the rows among the features of the call, in the order of their positions."""
        return slice(self.first_row, self.first_row + self.num_rows)


class FeatureReader(Drafter, Protocol):
    """A drafter that reads hidden states.

    Rows come once for each forward: prompts in chunks, then what each result accepted. They come in the order of their
    positions without gaps, but for these: the first received position of a sequence is above 0 if pages with a common
    beginning were taken over (unless `FeatureNeeds.of_whole_text`), or after a fault of the drafter, which is then
    opened afresh; and after a preemption positions are sent again, with the same bits. Rows of rejected drafts
    are never sent.
    """

    def observe(self, spans: Sequence[FeatureSpan], features: Tensor) -> None:
        """Take in rows of all its sequences in one forward.

        Args:
            spans: at most one of a sequence.
            features: [N, num_layers, H] in the target's dtype and on its device, of the drafter's own layers, ascending
                and each once. The drafter may keep it.
        """
        ...
