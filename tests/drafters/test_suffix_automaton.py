"""The automaton finds what a literal search finds, however the text repeats itself."""

import random

import pytest

from betoken.drafters.ngram.suffix_automaton import SuffixAutomaton


def occurrences(ids, ngram):
    """Start positions of an n-gram that have an id after it."""
    n = len(ngram)
    return [start for start in range(len(ids) - n) if ids[start : start + n] == ngram]


def longest_match(ids, max_length=None):
    """Length of the longest suffix that occurs earlier."""
    limit = len(ids) - 1 if max_length is None else min(max_length, len(ids) - 1)
    return next((n for n in range(limit, 0, -1) if occurrences(ids, ids[-n:])), 0)


def texts(num_texts, length):
    """Random texts over few ids, some of them periodic, some a single run."""
    rng = random.Random(5)
    for _ in range(num_texts):
        alphabet = rng.choice([1, 2, 3, 5, 12])
        period = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 9))]
        noise = rng.choice([0.0, 0.05, 1.0])
        size = rng.randrange(length)
        yield [rng.randrange(alphabet) if rng.random() < noise else period[i % len(period)] for i in range(size)]


def test_the_longest_match_equals_a_literal_search_after_every_id():
    num_found = 0
    for ids in texts(120, 60):
        automaton = SuffixAutomaton()
        for end in range(1, len(ids) + 1):
            automaton.extend(ids[end - 1 : end])
            state, length = automaton.match()
            assert length == longest_match(ids[:end])
            if length:
                position = automaton.next_position(state)
                assert length <= position < end
                assert ids[position - length : position] == ids[end - length : end]
                num_found += 1
    assert num_found > 1000


@pytest.mark.parametrize("max_length", [1, 2, 4])
def test_capped_matches_name_the_most_recent_occurrence_and_every_continuation(max_length):
    for ids in texts(60, 30):
        automaton = SuffixAutomaton()
        automaton.extend(ids)
        state, length = automaton.match(ids[-max_length:])
        assert length == longest_match(ids, max_length)
        if not length:
            continue
        starts = occurrences(ids, ids[-length:])
        assert automaton.next_position(state) == starts[-1] + length
        assert set(automaton.continuations(state)) == {ids[start + length] for start in starts}


def test_counts_of_continuations_are_those_of_the_text():
    for ids in texts(60, 30):
        automaton = SuffixAutomaton()
        automaton.extend(ids)
        state, length = automaton.match()
        for token_id, target in automaton.continuations(state).items():
            ngram = [*ids[len(ids) - length :], token_id]
            assert automaton.count(target) == len(occurrences(ids, ngram))


def test_a_token_never_matches_itself():
    automaton = SuffixAutomaton()
    assert automaton.match() == (0, 0)
    automaton.extend([1, 2, 3])
    assert automaton.match() == (0, 0)


def test_a_run_of_one_id_matches_all_but_its_last():
    automaton = SuffixAutomaton()
    automaton.extend([7] * 3000)
    state, length = automaton.match()
    assert length == 2999
    assert list(automaton.continuations(state)) == [7]


def test_a_capped_match_in_a_long_run_takes_no_longer_than_in_a_short_one():
    class Counting(list):
        num_reads = 0

        def __getitem__(self, index):
            self.num_reads += 1
            return super().__getitem__(index)

    num_reads = []
    for size in (100, 3000):
        ids = [7] * size
        automaton = SuffixAutomaton()
        automaton.extend(ids)
        automaton._links = Counting(automaton._links)
        state, length = automaton.match(ids[-4:])
        assert length == 4 and list(automaton.continuations(state)) == [7]
        num_reads.append(automaton._links.num_reads)
    assert num_reads[0] == num_reads[1]
