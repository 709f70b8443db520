"""Trials of a price: seldom while nothing is drafted, one at a time, and none while drafts are made."""

from betoken.common.economy.terms import USUAL_DRAFT_TOKENS, DraftTerms, PriceExploration

DEAR = DraftTerms(16, row_price=3.0, min_gain=0.2)
TRIAL = DraftTerms(USUAL_DRAFT_TOKENS, row_price=0.0, min_gain=0.2)


def test_a_trial_has_one_row_to_a_hundred_tokens_without_drafts():
    trials, num_rows = PriceExploration(), 0
    for _ in range(10_000):
        terms = trials.terms(DEAR)
        num_rows += 0 if terms is DEAR else terms.max_tokens
        trials.came(terms, 0 if terms is DEAR else terms.max_tokens)
        trials.add_tokens(1)
    assert 90 <= num_rows <= 100


def test_a_trial_that_found_nothing_to_draft_is_made_again_by_one_asking_at_a_time():
    trials = PriceExploration()
    trials.add_tokens(500)
    first = trials.terms(DEAR)
    assert (first, trials.terms(DEAR)) == (TRIAL, DEAR)
    trials.came(DEAR, 0)
    assert trials.terms(DEAR) == DEAR
    trials.came(first, 0)
    assert trials.terms(DEAR) == TRIAL


def test_drafts_that_are_made_need_no_trial():
    trials = PriceExploration()
    for _ in range(1000):
        assert trials.terms(DEAR) is DEAR
        trials.came(DEAR, 1)
        trials.add_tokens(2)
