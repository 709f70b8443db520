"""Drafts from earlier texts of a tenant: what enters the memory, who finds it, and when it is preferred."""

from itertools import count

import pytest

from betoken.common.economy.terms import DraftTerms
from betoken.common.errors import InvalidArgumentError
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from tests.drafters.suffix.bench import ANSWER, PROMPT, committed, drafted, drafter_with, num_rounds, opened


def test_a_second_equal_request_is_drafted_from_the_first_ones_answer():
    drafter = drafter_with()
    first, second = num_rounds(drafter), num_rounds(drafter)
    assert first > 50 and second < 10
    counts = drafter.memory_counts
    assert counts.num_hits >= second - 1 and counts.num_documents == 2 and counts.num_evicted == 0


@pytest.mark.parametrize("tenant", [b"b", b""])
def test_no_tenant_is_drafted_for_from_texts_of_another(tenant):
    drafter = drafter_with()
    first = num_rounds(drafter)
    assert num_rounds(drafter, tenant=tenant) == first
    assert (num_rounds(drafter, tenant=tenant) < first) == bool(tenant), "an unknown tenant's text is not kept"


def test_tenants_share_texts_if_the_operator_says_so():
    drafter = drafter_with(shares_tenants=True)
    assert num_rounds(drafter) > 5 * num_rounds(drafter, tenant=b"b")


def test_tokens_from_memory_and_from_the_own_text_name_their_sources():
    drafter = drafter_with()
    num_rounds(drafter)
    assert drafted(drafter, opened(drafter)).sources == ["suffix"]
    assert drafted(drafter, opened(drafter, tenant=b"b", prompt_ids=[1, 2, 3, 4, 5, 1, 2, 3])).sources == ["ngram"]


def test_a_draft_depends_on_memory_and_ids_alone():
    drafts = []
    for _ in range(2):
        drafter = drafter_with()
        for n in range(5):
            num_rounds(drafter, answer=[*ANSWER[: 10 * n], *reversed(ANSWER[10 * n :])])
        sequence = opened(drafter, takes_trees=True)
        drafts.append((drafted(drafter, sequence).draft_ids, drafted(drafter, sequence, 12).parents))
    assert drafts[0] == drafts[1]


def test_a_tree_holds_the_answers_that_differ_and_a_chain_the_most_frequent_one():
    drafter = drafter_with()
    for answer in (ANSWER, ANSWER, [*ANSWER[:3], *range(40)]):
        num_rounds(drafter, answer=answer)
    chain, tree = [drafted(drafter, opened(drafter, takes_trees=trees), 16) for trees in (False, True)]
    assert chain.draft_ids == ANSWER[:16] and chain.parents is None
    branch = [node for node, parent in enumerate(tree.parents) if parent == tree.draft_ids.index(ANSWER[2])]
    assert [tree.draft_ids[node] for node in branch] == [ANSWER[3], 0]


@pytest.mark.parametrize(("settings", "num_ids"), [({}, 16), ({"draft_factor": 1}, 5), ({"draft_factor": 0}, 16)])
def test_the_longest_draft_is_a_factor_times_the_match_plus_an_offset(settings, num_ids):
    drafter = drafter_with(**settings)
    num_rounds(drafter, prompt_ids=[7, 8, 9, 10, 11])
    sequence = opened(drafter, prompt_ids=[1, 7, 8, 9, 10, 11])
    assert len(drafted(drafter, sequence, 16).draft_ids) == num_ids
    offset = {"draft_offset": "3"} | {name: str(value) for name, value in settings.items()}
    sequence = opened(drafter, prompt_ids=[1, 7, 8, 9, 10, 11], settings=offset)
    assert len(drafted(drafter, sequence, 16).draft_ids) == min(16, num_ids + 3)


def test_a_draft_from_memory_ends_where_its_tokens_become_unlikely():
    drafter = drafter_with(min_percent=30)
    for n in range(3):
        num_rounds(drafter, answer=[*ANSWER[:4], *([100 + n] * 20)])
    assert drafted(drafter, opened(drafter), 16).draft_ids[:4] == ANSWER[:4]
    assert len(drafted(drafter, opened(drafter, settings={"min_percent": "60"}), 16).draft_ids) == 4


def test_a_draft_from_memory_that_does_not_pay_stays_empty():
    drafter = drafter_with()
    num_rounds(drafter)
    for terms, is_drafted in ((DraftTerms(8, 0.1, 0.5), True), (DraftTerms(8, 0.1, 99.0), False)):
        sequence = opened(drafter)
        sequence.terms = terms
        assert bool(drafted(drafter, sequence).draft_ids) == is_drafted
        assert (drafter.confidence(sequence) > 0) == is_drafted


def test_a_sequence_whose_tokens_depend_on_drafts_is_drafted_for_from_the_corpus_alone():
    drafter = drafter_with(corpus=[[1, 2, 3, 4, 5, 6]])
    num_rounds(drafter)
    assert not drafted(drafter, opened(drafter, draft_affects_output=True)).draft_ids
    sequence = opened(drafter, prompt_ids=[9, 1, 2, 3], draft_affects_output=True)
    assert drafted(drafter, sequence).draft_ids == [4, 5, 6]


def test_the_corpus_serves_every_tenant_and_the_longer_match_wins():
    drafter = drafter_with(corpus=[[5, 1, 2, 3, 4]])
    for tenant in (b"a", b"b", b""):
        assert drafted(drafter, opened(drafter, prompt_ids=[9, 1, 2, 3], tenant=tenant)).draft_ids == [4]
    num_rounds(drafter, prompt_ids=[1, 2, 3], answer=[7, 7])
    assert drafted(drafter, opened(drafter, prompt_ids=[9, 1, 2, 3])).draft_ids[0] == 7
    assert drafted(drafter, opened(drafter, prompt_ids=[5, 1, 2, 3])).draft_ids[0] == 4


def test_a_sequence_that_is_reopened_is_remembered_once():
    drafter = drafter_with()
    sequence = opened(drafter, prompt_ids=PROMPT * 10)
    for _ in range(5):
        drafter.close(sequence)
        drafter.open(sequence)
    committed(drafter, sequence, ANSWER)
    drafter.close(sequence)
    assert drafter.memory_counts.num_tokens < len(sequence.ids) + 6 * 100


def test_a_branch_with_hypothetical_ids_is_not_remembered():
    drafter = drafter_with()
    branch = opened(drafter).branched(ANSWER)
    drafter.open(branch)
    drafter.close(branch)
    assert drafter.memory_counts.num_documents == 0


@pytest.mark.parametrize("settings", [{"min_match": "1"}, {"min_percent": "101"}, {"typo": "1"}])
def test_settings_of_suffix_outside_their_limits_are_rejected_by_name(settings):
    with pytest.raises(InvalidArgumentError, match=r"drafter.settings"):
        opened(drafter_with(), settings=settings)


def test_fused_drafts_from_memory_and_feeds_it():
    suffix = drafter_with()
    fused = FusedDrafter({"ngram": NgramDrafter(), "suffix": suffix}, count(step=1000).__next__)  # equally fast sources
    for _ in range(3):
        sequence = opened(fused)
        for token_id in ANSWER:
            fused.request(sequence, 4)
            while suffix.has_work or fused.sources["ngram"].has_work or fused.has_work:
                for drafter in (*fused.sources.values(), fused):
                    drafter.step()
            committed(fused, sequence, [token_id])
        fused.close(sequence)
    counts = suffix.memory_counts
    assert counts.num_documents == 3 and counts.num_hits > len(ANSWER)
