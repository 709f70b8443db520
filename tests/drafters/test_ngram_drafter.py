"""N-gram drafts go on as the text did: chains as the most recent time, trees as most often."""

import random

import pytest

from betoken.common.economy.acceptance import Calibration
from betoken.common.economy.terms import DraftTerms
from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.commands import Commit
from betoken.drafters.drafter import DraftSequence
from betoken.drafters.ngram import drafter as ngram_drafter
from betoken.drafters.ngram.drafter import NgramDrafter, NgramLookup
from betoken.drafters.ngram.settings import NgramSettings
from betoken.engine.sampling import SamplingParams
from tests.draft_worker.harness import Bench, request


def propose(ids, num_tokens=6, takes_trees=True, **settings):
    return NgramLookup(NgramSettings(**settings), list(ids)).propose(num_tokens, takes_trees)


def literal_chain(ids, num_tokens, min_ngram, max_ngram):
    """Longest suffix first, most recent earlier occurrence with a token after it."""
    for n in range(min(max_ngram, len(ids)), min_ngram - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                period = len(ids) - start - n
                return [ids[start + n + i % period] for i in range(num_tokens)]
    return []


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_ngram_chains_equal_a_literal_search_at_every_length(min_ngram, max_ngram):
    rng = random.Random(max_ngram)
    settings = NgramSettings(min_ngram, max_ngram, max_branches=1, draft_factor=0)
    ids, num_found = [], 0
    lookup = NgramLookup(settings, ids)
    for _ in range(300):
        ids += [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
        lookup.follow()
        expected = literal_chain(ids, 5, min_ngram, max_ngram)
        assert lookup.propose(5, takes_trees=True) == (expected, None)
        num_found += bool(expected)
    assert num_found > 100


def test_an_ngram_tree_prefers_the_most_frequent_continuation():
    draft_ids, parents = propose([1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3, 12, 1, 2, 4, 13, 1, 2], num_tokens=3)
    assert (draft_ids[0], parents[0]) == (3, -1)
    assert 4 in draft_ids and parents[draft_ids.index(4)] == -1


def test_a_target_that_takes_chains_gets_the_most_recent_one():
    assert propose([1, 2, 3, 1, 2, 4, 1, 2], num_tokens=3, takes_trees=False) == ([4, 1, 2], None)
    assert propose([1, 2, 3, 1, 2, 4, 1, 2], num_tokens=3, max_branches=1) == ([4, 1, 2], None)


def test_a_single_continuation_is_a_chain_that_runs_into_the_present():
    assert propose([1, 2, 3, 1, 2], num_tokens=7) == ([3, 1, 2, 3, 1, 2, 3], None)


def test_a_short_match_gives_a_short_draft():
    ids = [9, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(propose(ids, num_tokens=8, draft_factor=3)[0]) == 3
    assert len(propose(ids, num_tokens=8, draft_factor=0)[0]) == 8


REPEATED = [1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3, 12, 1, 2, 4, 13, 1, 2]


def proposed(terms, num_tokens=6, takes_trees=True):
    return NgramLookup(NgramSettings(), list(REPEATED)).propose(num_tokens, takes_trees, terms)


def test_under_terms_a_draft_is_as_long_as_pays_off():
    everything, parents = proposed(DraftTerms(16))
    assert len(everything) > 6, "not the number asked for"
    sizes = []
    for row_price in (0.0, 0.05, 0.1, 0.2, 0.4, 0.6):
        draft_ids, some_parents = proposed(DraftTerms(16, row_price))
        sizes.append(len(draft_ids))
        assert draft_ids == everything[: sizes[-1]], "the likeliest of all"
        assert some_parents is None or some_parents == parents[: sizes[-1]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > sizes[-1]
    assert len(proposed(DraftTerms(4))[0]) == 4


def test_a_draft_that_does_not_gain_enough_is_empty():
    (draft_id,), _ = proposed(DraftTerms(1, 0.1))
    assert draft_id == 3
    # The match is 2 tokens long and 3 of 5 counts went on with 3: 2/3 * 3/5 = 0.4, less the price.
    assert proposed(DraftTerms(1, 0.1, min_gain=0.29))[0] == [3]
    assert proposed(DraftTerms(1, 0.1, min_gain=0.31))[0] == []
    assert proposed(DraftTerms(16, 0.9)) == ([], None)


def test_terms_do_not_shorten_chains_of_the_most_recent_match():
    assert proposed(DraftTerms(16, 0.9), num_tokens=3, takes_trees=False) == proposed(None, 3, takes_trees=False)


def test_scores_of_ngrams_are_corrected_by_accepted_tokens(fake_runner_class):
    bench = Bench(fake_runner_class())
    rng = random.Random(2)
    bench.open(1, [rng.randrange(8) for _ in range(40)], "ngram", max_length=100_000)
    sizes = []
    for _ in range(300):
        bench.core.apply(request(bench.core, 1, 5, 0, True, DraftTerms(16, 0.05)))
        bench.core.step()
        sizes.append(len(bench.sink.answers.pop().drafted.draft_ids))
        entry = bench.core._sequences[(1, 1)].sequence
        bench.core.apply(Commit((1, 1), len(entry.ids), [8 + rng.randrange(80)]))  # never what was seen before
        bench.core.apply(Commit((1, 1), len(entry.ids), [rng.randrange(8)]))
    assert sum(sizes[:20]) / 20 > 4
    assert sum(sizes[-100:]) / 100 < sum(sizes[:20]) / 20 / 2


def test_an_ngram_drafter_that_was_wrong_for_long_is_used_again():
    rng, calibration = random.Random(3), Calibration()
    terms = DraftTerms(16, 0.9)

    def sizes(next_ids):
        ids = [*range(8)] * 8
        lookup = NgramLookup(NgramSettings(), ids, calibration)
        for token_id in next_ids:
            draft_ids, _ = lookup.propose(5, True, terms)
            yield len(draft_ids)
            ids.append(token_id)
            lookup.follow()

    assert sum(sizes(range(8))) >= 32
    for _ in range(200):  # each text starts as the first did and goes on otherwise
        list(sizes([50 + rng.randrange(40)]))
    assert sum(sizes([0])) == 0
    for _ in range(400):
        list(sizes([0]))
    assert sum(sizes([0])) >= 1


def test_matches_shorter_than_min_ngram_are_not_drafted_from():
    assert propose([1, 2, 1], min_ngram=2) == ([], None)
    assert propose([1, 2, 3], min_ngram=1) == ([], None)


@pytest.mark.parametrize(
    ("ids", "settings", "expected"),
    [
        ([1, 2, 3], {}, 0),
        ([], {}, 0),
        ([1, 2, 1], {}, 1),
        ([1, 2, 1], {"min_ngram": 2}, 0),
        ([1, 2, 3, 1, 2], {}, 2),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], {}, 3),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], {"max_ngram": 3}, 2),
        ([*range(40), *range(39)], {}, 6),
        ([*range(400), *range(399)], {}, 6),
    ],
)
def test_confidence_grows_with_the_match(ids, settings, expected):
    drafter = NgramDrafter(NgramSettings(**settings))
    sequence = DraftSequence((1, 1), SamplingParams(), ids, [], 1000)
    drafter.open(sequence)
    assert drafter.confidence(sequence) == expected


def test_ngram_trees_are_valid_and_every_path_is_a_continuation_in_the_text():
    rng = random.Random(1)
    num_branched = 0
    for _ in range(300):
        ids = [rng.randrange(4) for _ in range(rng.randrange(2, 50))]
        limit, branches, factor = rng.randrange(1, 12), rng.randrange(2, 5), rng.randrange(1, 4)
        lookup = NgramLookup(NgramSettings(max_branches=branches, draft_factor=factor), ids)
        draft_ids, parents = lookup.propose(limit, takes_trees=True)
        num_branched += parents is not None
        parents = parents or range(-1, len(draft_ids) - 1)
        assert len(draft_ids) <= limit
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        for parent in {-1, *parents}:
            children = [draft_ids[node] for node, above in enumerate(parents) if above == parent]
            assert len(children) == len(set(children)) <= branches
        grams = {tuple(ids[i : i + 2]) for i in range(len(ids) - 1)}
        for node, parent in enumerate(parents):
            before = ids[-1] if parent < 0 else draft_ids[parent]
            assert (before, draft_ids[node]) in grams
    assert num_branched > 100


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"min_ngram": "0"}, "drafter.settings.min_ngram"),
        ({"max_ngram": "x"}, "drafter.settings.max_ngram"),
        ({"max_ngram": "99999999999999"}, "drafter.settings.max_ngram"),
        ({"max_branches": "0"}, "drafter.settings.max_branches"),
        ({"draft_factor": "-1"}, "drafter.settings.draft_factor"),
        ({"min_ngram": "5", "max_ngram": "4"}, "drafter.settings.min_ngram"),
        ({"ngram": "1"}, "drafter.settings"),
    ],
)
def test_bad_ngram_settings_are_rejected_by_name(settings, field):
    with pytest.raises(InvalidArgumentError, match=rf"^{field} = "):
        NgramSettings().override(settings)


def test_ngram_settings_of_a_sequence_replace_the_workers():
    new = NgramSettings().override({"min_ngram": "2", "max_branches": "1"})
    assert new == NgramSettings(min_ngram=2, max_branches=1)


def test_a_long_text_is_taken_in_by_parts_while_others_are_answered(monkeypatch):
    rng = random.Random(1)
    texts = {name: [rng.randrange(4) for _ in range(length)] for name, length in (("long", 95), ("short", 9))}
    expected = {name: propose(ids, takes_trees=False)[0] for name, ids in texts.items()}
    monkeypatch.setattr(ngram_drafter, "_MAX_IDS_AT_ONCE", 10)
    drafter = NgramDrafter()
    keys = {"long": (1, 1), "short": (1, 2)}
    sequences = {name: DraftSequence(keys[name], SamplingParams(), ids, [], 1000) for name, ids in texts.items()}
    for sequence in sequences.values():
        drafter.open(sequence)
        drafter.request(sequence, 6)
    assert expected["long"] and drafter.propose(sequences["long"], 6).draft_ids == []
    answers = [drafter.step() for _ in range(9)]
    assert [len(drafted) for drafted in answers] == [1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert answers[0][0].draft_ids == expected["short"]
    assert answers[-1][0].draft_ids == expected["long"]
    assert not drafter.has_work
