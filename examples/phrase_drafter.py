"""A custom drafter: after the beginning of a known phrase it proposes the rest.

`betoken draft-worker --drafters phrase_drafter:PhraseDrafter`, started in this folder, hosts it.
"""

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.settings import check_names, integer

PHRASES = [[11, 12, 13, 14, 15], [11, 12, 20, 21]]  # token ids


class PhraseDrafter(ImmediateDrafter):
    """Proposes the phrase whose beginning matches the longest end of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.min_match: dict[DraftSequence, int] = {}

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ["min_match"])  # refused by name when unknown
        self.min_match[sequence] = integer(sequence.settings, "min_match", default=2, lowest=1, highest=8)

    def close(self, sequence: DraftSequence) -> None:
        super().close(sequence)
        self.min_match.pop(sequence, None)

    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        for length in range(8, self.min_match[sequence] - 1, -1):
            for phrase in PHRASES:
                if length < len(phrase) and sequence.ids[-length:] == phrase[:length]:
                    return Drafted(sequence, phrase[length:][:num_tokens])
        return Drafted(sequence, [])
