"""The lookahead branch: trajectories of guesses that are iterated in parallel, and the n-grams they leave behind.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv:2402.02057,
Algorithm 2. Knows token ids and positions only: no model, no pool, no sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Column:
    """A trajectory: the tokens of its N - 1 levels, at consecutive positions."""

    ids: list[int]
    num_answers: int
    """How many of its last tokens a model gave; the others were drawn."""


class Window:
    """N - 1 levels x W columns, attached to the last committed token.

    With that token at position t, level l of column i has position t + l + i; level 0 of column 0 is the token
    itself. A row sees the committed text, level 0 up to its own column, and its own column up to its own level: the
    paper's mask, which is a tree.
    """

    def __init__(self, width: int, ngram_size: int, draw: Callable[[], int]) -> None:
        """`width`: W; `ngram_size`: N, both at least 2. `draw`: a token to begin a trajectory with."""
        self.width = width
        self.num_levels = ngram_size - 1
        self._draw = draw
        self._columns: list[_Column] = []
        self._position = 0

    @property
    def num_rows(self) -> int:
        """Rows of a step, including the last committed token's."""
        return self.width * self.num_levels

    @property
    def reach(self) -> int:
        """Distance of the last row's position from the last committed token's."""
        return self.width - 1 + self.num_levels - 1

    def attach(self, position: int, token_id: int) -> None:
        """Move to the last committed token.

        Columns ahead of it keep their positions. Columns that it has passed come in again at the right, further
        iterated than tokens drawn anew. Column 0 does not, since its tokens are already committed.
        """
        num_passed = position - self._position
        passed, self._columns = self._columns[:num_passed], self._columns[num_passed:]
        self._columns += passed[1:]
        del self._columns[self.width :]
        while len(self._columns) < self.width:
            self._columns.append(_Column([self._draw() for _ in range(self.num_levels)], num_answers=0))
        self._position = position
        self._columns[0].ids[0] = token_id

    def nodes(self) -> tuple[list[int], list[int]]:
        """The rows after the last committed token's, level by level: ids and parents, -1 = that token.

        With it they are num_rows rows, of which row l * W + i is level l of column i.
        """
        ids = [column.ids[level] for level in range(self.num_levels) for column in self._columns]
        parents = [row - 1 if row < self.width else row - self.width for row in range(1, self.num_rows)]
        return ids[1:], [parent - 1 for parent in parents]

    def asked(self) -> list[tuple[int, list[int]]]:
        """Questions for `take`: rows, each with the ids that it follows after the last committed token.

        First column 0 but its last level, downwards; then the last level, from column 0 on.
        """
        first = self._columns[0].ids[1:]
        below = [(level * self.width, first[:level]) for level in range(self.num_levels - 1)]
        last_row = (self.num_levels - 1) * self.width
        base = [column.ids[0] for column in self._columns]
        return below + [
            (last_row + index, base[1 : index + 1] + column.ids[1:]) for index, column in enumerate(self._columns)
        ]

    def take(self, answers: Sequence[int]) -> list[tuple[int, ...]]:
        """One step: the answers become the last level, the oldest level is dropped.

        A column moves one position on by that. Column 0 begins anew with the last committed token and the model's
        answers along it, which is plain Jacobi iteration.

        Args:
            answers: in the order of `asked`.
        Returns:
            The columns' n-grams, N tokens each, the nearest last; without n-grams that still hold tokens drawn behind
            their first.
        """
        num_below = self.num_levels - 1
        ngrams = []
        for column, answer in zip(self._columns, answers[num_below:], strict=True):
            if column.num_answers >= num_below:
                ngrams.append((*column.ids, answer))
            column.ids = [*column.ids[1:], answer]
            column.num_answers = min(column.num_answers + 1, self.num_levels)
        self._columns.insert(0, _Column([0, *answers[:num_below]], self.num_levels))
        return ngrams[::-1]
