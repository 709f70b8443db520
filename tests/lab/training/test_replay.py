"""Drafts of a drafter by its protocol, on answers that are known: accepted as far as they are the text's."""

import pytest

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.training.replay import accepted_depth, replay
from betoken.training.samples import Sample


@pytest.mark.parametrize(
    ("draft_ids", "parents", "depth"),
    [
        ([5, 6, 9], None, 2),
        ([9, 5, 6], None, 0),
        ([], None, 0),
        ([9, 5, 8, 6, 7], [-1, -1, 0, 1, 3], 3),
        ([5, 6, 6], [-1, 0, -1], 2),
    ],
)
def test_a_draft_is_accepted_as_far_as_it_goes_along_the_text(
    draft_ids: list[int], parents: list[int] | None, depth: int
) -> None:
    sequence = DraftSequence((0, 0), None, [1], [], 9)  # type: ignore[arg-type]
    assert accepted_depth(Drafted(sequence, draft_ids, parents), [5, 6, 7]) == depth


class Counting(ImmediateDrafter):
    """Says that numbers go on by one."""

    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        last = sequence.ids[-1]
        return Drafted(sequence, list(range(last + 1, last + 1 + num_tokens)))


def test_rounds_end_where_answers_do() -> None:
    """After the prompt's own token 2: 3 4 and 20; nothing is right and 30; 31 alone is left, which the target gives."""
    rounds = replay(Counting(), [Sample((0, 1, 2, 3, 4, 20, 30, 31), 2)], 5)
    assert (rounds.num_rounds, rounds.num_tokens, rounds.depths) == (3, 5, {2: 1, 0: 2})


def test_answers_beside_each_other_count_as_alone() -> None:
    samples = [Sample((*range(7), *range(7), *range(7), number, *range(5)), 4) for number in (3, 90)]
    together = replay(NgramDrafter(), samples, 8)
    alone = [replay(NgramDrafter(), [sample], 8) for sample in samples]
    assert together.num_tokens == sum(one.num_tokens for one in alone) > together.num_rounds
