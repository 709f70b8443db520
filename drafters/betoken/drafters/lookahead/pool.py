"""The n-grams of one sequence by their first token, bounded, and the tree of guesses they make.

Source: the n-gram pool of arXiv:2402.02057 (Algorithm 2). Knows token ids only.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_NGRAMS = 1 << 14
"""Most n-grams in a sequence's pool; the least recently used is dropped first."""


class NgramPool:
    """At most `max_guesses` n-grams for each first token, and `max_ngrams` in all."""

    def __init__(self, max_guesses: int, max_ngrams: int = MAX_NGRAMS) -> None:
        self._max_guesses = max_guesses
        self._max_ngrams = max_ngrams
        self._ngrams: OrderedDict[tuple[int, ...], None] = OrderedDict()  # least recently used first
        self._tails: dict[int, OrderedDict[tuple[int, ...], None]] = {}  # the same by first token, in the same order

    def __len__(self) -> int:
        return len(self._ngrams)

    def add(self, ngrams: Iterable[Sequence[int]]) -> None:
        """Take n-grams in, or mark them as used, the last of them most recently."""
        for ngram in ngrams:
            first, *rest = ngram
            tail = tuple(rest)
            tails = self._tails.setdefault(first, OrderedDict())
            tails[tail] = None
            tails.move_to_end(tail)
            self._ngrams[first, *tail] = None
            self._ngrams.move_to_end((first, *tail))
            if len(tails) > self._max_guesses:
                self._drop((first, *next(iter(tails))))
            if len(self._ngrams) > self._max_ngrams:
                self._drop(next(iter(self._ngrams)))

    def guesses(self, token_id: int) -> list[tuple[int, ...]]:
        """Continuations of a token, N - 1 tokens each, the most recently used first."""
        return list(reversed(self._tails.get(token_id, ())))

    def _drop(self, ngram: tuple[int, ...]) -> None:
        first, *tail = ngram
        del self._ngrams[ngram]
        del self._tails[first][tuple(tail)]
        if not self._tails[first]:
            del self._tails[first]


def merge_guesses(guesses: Iterable[Sequence[int]], num_nodes: int) -> tuple[list[int], list[int]]:
    """A tree of at most `num_nodes` nodes with the guesses as paths, the first of them whole, prefixes shared.

    Returns:
        ids [K] and parents [K], -1 = the token that all guesses follow.
    """
    ids: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for guess in guesses:
        node = -1
        for token_id in guess:
            child = children.get((node, token_id))
            if child is None:
                if len(ids) == num_nodes:
                    break
                child = children[node, token_id] = len(ids)
                ids.append(token_id)
                parents.append(node)
            node = child
    return ids, parents
