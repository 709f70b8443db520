"""A suffix automaton over a growing list of token ids: the longest repeated suffix, and what followed it before.

Each state stands for all n-grams with the same set of end positions. Adding an id is amortised O(1), and the longest
match is one step away from the last state. Knows ids, not what is made of them.
Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from collections.abc import Iterable, Mapping, Sequence

_MAX_COUNTED = 32
"""Contexts, longest first, whose occurrence is noted per id. Text nests fewer; a run of one id would nest for ever."""


class SuffixAutomaton:
    """Grows by `extend`. A state is an index; 0 is the empty n-gram's."""

    def __init__(self) -> None:
        self.num_ids = 0
        self._last = 0
        """The state of all ids; its suffix links lead through ever shorter suffixes."""
        self._lengths = [0]
        """Length of the longest n-gram of each state."""
        self._links = [-1]
        self._transitions: list[dict[int, int]] = [{}]
        self._counts = [0]
        self._ends = [-1]
        """Index of the last id of the most recent occurrence that has an id after it."""

    def extend(self, ids: Iterable[int]) -> None:
        """Append ids."""
        for token_id in ids:
            self._count_last()  # only now do its suffixes have an id after them
            self._append(token_id)

    def match(self, tail: Sequence[int] | None = None) -> tuple[int, int]:
        """State and length of the longest suffix that occurs earlier; (0, 0) if none.

        `tail`: the last ids, if no longer suffix is wanted. A run of one id would put as many states as it is long
            between the longest suffix and that one, so the run is read from its beginning.
        """
        if not self.num_ids:
            return 0, 0
        state = self._links[self._last]
        if tail is None or self._lengths[state] <= len(tail):
            return state, self._lengths[state]
        state = 0
        for token_id in tail:
            state = self._transitions[state][token_id]
        return state, len(tail)

    def read(self, match: tuple[int, int], token_id: int) -> tuple[int, int]:
        """The match of a text after one more id, which is not appended; (0, 0) if none."""
        state, length = match
        while state and token_id not in self._transitions[state]:
            state = self._links[state]
            length = self._lengths[state]
        target = self._transitions[state].get(token_id, 0)
        if target == self._last:  # it ends with the ids: only shorter matches have continuations
            target = self._links[target]
            return target, min(length + 1, self._lengths[target])
        return target, length + 1 if target else 0

    def next_position(self, state: int) -> int:
        """Index of the id after the most recent earlier occurrence of a matched state."""
        return self._ends[state] + 1

    def continuations(self, state: int) -> Mapping[int, int]:
        """The ids that followed the state's n-grams, each with the state it leads to; none for the last id's state."""
        return self._transitions[state]

    def count(self, state: int) -> int:
        """Occurrences of the state's n-grams, as far as they were among the longest contexts at their end."""
        return self._counts[state]

    def _count_last(self) -> None:
        state = self._last
        for _ in range(_MAX_COUNTED):
            if state <= 0:
                return
            self._counts[state] += 1
            self._ends[state] = self.num_ids - 1
            state = self._links[state]

    def _append(self, token_id: int) -> None:
        transitions, links = self._transitions, self._links
        state = self._last
        new = self._add_state(self.num_ids + 1, 0, {}, 0, self.num_ids)
        while state >= 0 and token_id not in transitions[state]:
            transitions[state][token_id] = new
            state = links[state]
        if state >= 0:
            target = transitions[state][token_id]
            if self._lengths[target] != self._lengths[state] + 1:
                target = self._split(state, token_id, target)
            links[new] = target
        self._last = new
        self.num_ids += 1

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Give the n-grams of `target` that end a `state` n-gram + `token_id` a separate state."""
        clone = self._add_state(
            self._lengths[state] + 1,
            self._links[target],
            dict(self._transitions[target]),
            self._counts[target],
            self._ends[target],
        )
        while state >= 0 and self._transitions[state].get(token_id) == target:
            self._transitions[state][token_id] = clone
            state = self._links[state]
        self._links[target] = clone
        return clone

    def _add_state(self, length: int, link: int, transitions: dict[int, int], count: int, end: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._transitions.append(transitions)
        self._counts.append(count)
        self._ends.append(end)
        return len(self._lengths) - 1
