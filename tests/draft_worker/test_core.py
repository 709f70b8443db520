"""The draft core drafts what its drafters say, follows commits by ids, and outlives a drafter that raises."""

import math
import time
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from betoken.common.economy.terms import DraftTerms
from betoken.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from betoken.common.names import ERROR_TYPE
from betoken.draft_worker.commands import Commit, RequestDraft
from betoken.drafters import shared_pages
from betoken.drafters.drafter import Drafted
from betoken.drafters.model import drafter as model_drafter
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.link import sequence_table
from betoken.rpc.link.commands import Close, CloseLink
from tests.draft_worker.harness import Bench, request


@pytest.fixture
def bench(fake_runner_class):
    return Bench(fake_runner_class())


def test_the_model_drafter_continues_as_its_model_does(bench):
    bench.open(1, [1, 2, 3])
    assert bench.draft(1) == {1: bench.runner.complete([1, 2, 3], 4)}


def test_the_load_is_reported_when_a_sequence_comes_and_goes(bench):
    loads = []
    for sequence_id in (1, 2):
        bench.open(sequence_id, [1, 2, 3], drafter="ngram")
        loads.append(bench.sink.load.num_running)
    bench.core.apply(Close((1, 1)))
    assert [*loads, bench.sink.load.num_running] == [1, 2, 1]


@pytest.mark.parametrize("max_sequences", [1, 8])
def test_a_sequence_opened_twice_is_closed_as_its_error_says(fake_runner_class, max_sequences):
    bench = Bench(fake_runner_class(), max_sequences)
    for _ in range(2):
        bench.open(1, [1, 2, 3])
    assert isinstance(bench.sink.failures[(1, 1)], FailedPreconditionError)
    assert bench.sink.load.num_running == 0 and bench.runner.page_table.num_free == bench.runner.page_table.num_pages


def test_a_prompt_seen_before_is_not_computed_again(bench):
    prompt = list(range(30))
    bench.open(1, prompt)
    first = bench.draft(1)[1]
    num_before = len(bench.runner.forwards)
    bench.open(2, prompt)
    assert bench.draft(2) == {2: first}
    assert sum(bench.runner.forwards[num_before:]) == 33 - 28  # seven pages of four ids
    bench.core.apply(Close((1, 1)))
    bench.core.apply(Close((1, 2)))
    assert bench.runner.page_table.num_free == bench.runner.page_table.num_pages


def test_rejected_drafts_are_never_found_in_the_prefix_cache(bench):
    prompt = list(range(10))
    bench.open(1, prompt)
    refused = bench.draft(1, num_tokens=9)[1]
    bench.core.apply(Commit((1, 1), 10, [80]))
    bench.open(2, [*prompt, *refused, 5])
    num_before = len(bench.runner.forwards)
    bench.draft(2, num_tokens=1)
    assert sum(bench.runner.forwards[num_before:]) == 20 - 8


def test_a_draft_costs_as_many_forwards_as_draft_tokens(bench):
    bench.open(1, [1, 2, 3])
    bench.draft(1, num_tokens=4)
    bench.runner.forwards.clear()
    truth = bench.runner.complete([1, 2, 3], 5)
    bench.core.apply(Commit((1, 1), 3, truth))  # all accepted and the bonus token: two rows to catch up
    bench.draft(1, num_tokens=4)
    assert bench.runner.forwards == [2, 1, 1, 1]
    assert [answer.drafted.num_forwards for answer in bench.sink.answers] == [4]


def test_prefill_is_no_draft_forward(bench):
    bench.open(1, [n % 90 for n in range(40)])
    bench.draft(1, num_tokens=2)
    assert len(bench.runner.forwards) == 4
    assert [answer.drafted.num_forwards for answer in bench.sink.answers] == [2]


def test_drafts_that_take_long_are_reported_as_pending(bench, monkeypatch):
    monkeypatch.setattr(sequence_table, "PENDING_INTERVAL_S", 0.0)
    bench.open(1, [n % 90 for n in range(40)])
    bench.open(2, [1, 2])  # without a draft request
    bench.draft(1, num_tokens=2)
    assert bench.sink.pendings and {key for keys in bench.sink.pendings for key in keys} == {(1, 1)}


def test_a_draft_that_comes_soon_is_not_reported_as_pending(bench, monkeypatch):
    monkeypatch.setattr(sequence_table, "PENDING_INTERVAL_S", 60.0)
    bench.open(1, [n % 90 for n in range(40)])
    assert bench.draft(1) and not bench.sink.pendings


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3, 4])
def test_drafts_follow_every_commit_by_ids(bench, num_accepted):
    prompt = [1, 2, 3, 4, 5]
    bench.open(1, prompt)
    drafted = bench.draft(1)[1]
    committed = [*drafted[:num_accepted], 42]
    bench.core.apply(Commit((1, 1), 5, committed))
    assert bench.draft(1) == {1: bench.runner.complete(prompt + committed, 4)}
    bench.core.apply(Commit((1, 1), 5 + len(committed), [7, 7]))
    assert bench.draft(1) == {1: bench.runner.complete([*prompt, *committed, 7, 7], 4)}


def test_sequences_are_drafted_for_in_one_batch_with_long_prompts_in_chunks(bench):
    bench.open(1, [1, 2])
    bench.open(2, [n % 90 for n in range(50)])
    bench.open(3, [5])
    drafts = bench.draft(1, 2, 3, num_tokens=3)
    assert drafts[1] == bench.runner.complete([1, 2], 3)
    assert drafts[2] == bench.runner.complete([n % 90 for n in range(50)], 3)
    assert drafts[3] == bench.runner.complete([5], 3)
    assert max(bench.runner.forwards) <= 16


def test_sequences_that_paused_share_the_prefill_tokens_of_a_forward(bench):
    """Each has missed more than a chunk; all three take one chunk of a forward with a drafting sequence."""
    texts = {n: [n, n + 1] for n in range(1, 5)}
    for n, text in texts.items():
        bench.open(n, text)
    bench.draft(*texts)
    for n, text in list(texts.items())[1:]:
        missed = [(n + index) % 90 for index in range(30)]
        bench.core.apply(Commit((1, n), len(text), missed))
        text += missed
    bench.runner.forwards.clear()
    assert bench.draft(*texts) == {n: bench.runner.complete(text, 4) for n, text in texts.items()}
    beside, alone = bench.runner.forwards[:4], bench.runner.forwards[4:]
    assert max(beside) <= 6 + 2 and max(alone) <= 16


def test_idle_sequences_give_up_their_pages_and_are_recomputed(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=6, page_size=4, max_context=24))
    prompts = {n: [n] * 12 for n in range(1, 5)}
    for n, prompt in prompts.items():
        bench.open(n, prompt)
    for _ in range(2):
        for n, prompt in prompts.items():
            assert bench.draft(n) == {n: bench.runner.complete(prompt, 4)}


@pytest.mark.parametrize("is_together", [False, True])
def test_a_sequence_without_pages_waits_and_does_not_slow_drafting_sequences(fake_runner_class, is_together):
    bench = Bench(fake_runner_class(num_pages=17, page_size=4, max_context=60), idle_grace_s=60.0)
    texts = {n: [n] * 20 for n in range(1, 4)}  # with what comes, eight pages each
    for n, text in texts.items():
        bench.open(n, text)
    for _ in range(3):
        drafts = bench.draft(*texts) if is_together else {n: bench.draft(n)[n] for n in texts}
        assert drafts == {1: bench.runner.complete(texts[1], 4), 2: bench.runner.complete(texts[2], 4), 3: []}
        for n, text in texts.items():
            ids = bench.runner.complete(text, 4)
            bench.core.apply(Commit((1, n), len(text), ids))
            text += ids
    assert sum(bench.runner.forwards) == 2 * (20 + 3 + 2 * 4), "no prompt was computed twice, and none in part"
    bench.core.apply(Close((1, 1)))
    assert bench.draft(3) == {3: bench.runner.complete(texts[3], 4)}


def test_an_older_sequence_takes_pages_of_a_younger_one_and_keeps_its_own_for_a_while(fake_runner_class, monkeypatch):
    now_ns = 10**12
    clock = Mock(perf_counter_ns=lambda: now_ns)
    for module in (shared_pages, model_drafter):
        monkeypatch.setattr(module, "time", clock)
    bench = Bench(fake_runner_class(num_pages=6, page_size=4, max_context=24), idle_grace_s=1.0)
    bench.open(1, [1] * 12)
    bench.open(2, [2] * 12)
    right = {n: bench.runner.complete([n] * 12, 4) for n in (1, 2)}
    assert bench.draft(2) == {2: right[2]}
    assert bench.draft(1) == {1: right[1]}
    assert bench.draft(2) == {2: []}
    now_ns += 10**9
    assert bench.draft(2) == {2: right[2]}


def test_a_sequence_larger_than_all_pages_is_not_computed_and_takes_no_page(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=12, page_size=4, max_context=48))
    bench.open(1, range(60))
    bench.open(2, [7] * 10)
    bench.draft(2)
    num_forwards = len(bench.runner.forwards)
    assert bench.draft(1) == {1: []} and len(bench.runner.forwards) == num_forwards
    assert bench.draft(2) == {2: bench.runner.complete([7] * 10, 4)}
    assert sum(bench.runner.forwards[num_forwards:]) == 4, "the last id and three drafts: nothing was lost"


def test_a_full_context_or_foreign_ids_give_an_empty_draft(fake_runner_class):
    bench = Bench(fake_runner_class(max_context=8))
    bench.open(1, [1] * 6)
    bench.open(2, [1] * 9)
    bench.open(3, [1, 2])
    assert {n: len(draft) for n, draft in bench.draft(1, 2).items()} == {1: 2, 2: 0}
    bench.core.apply(Commit((1, 3), 2, [1_000]))
    assert bench.draft(3) == {3: []}


def test_ngram_and_model_are_chosen_per_sequence(bench):
    bench.open(1, [1, 2, 3, 4, 1, 2], "ngram")
    bench.open(2, [1, 2, 3, 4, 1, 2], "model")
    bench.open(3, [1, 2, 3, 4, 1, 2], "")
    drafts = bench.draft(1, 2, 3, num_tokens=3)
    assert drafts[1] == [3, 4, 1]
    assert drafts[2] == drafts[3] == bench.runner.complete([1, 2, 3, 4, 1, 2], 3)


def test_a_sequence_that_wants_probabilities_gets_what_each_token_was_sampled_from(bench):
    for n in (1, 2):
        bench.open(n, [1, 2, 3], wants_probs=n == 1, temperature=2.0)
    bench.open(3, [1, 2, 3, 1, 2], "ngram", wants_probs=True, temperature=2.0)
    bench.open(4, [1, 2, 3], temperature=2.0)
    alone = {n: bench.draft(n)[n] for n in (2, 4)}
    together = bench.draft(1, 2, 3, 4)
    answers = {answer.key[1]: answer.drafted for answer in bench.sink.answers}
    assert {n: together[n] for n in alone} == alone, "what one sequence wants changes no other"
    assert [len(answers[n].draft_probs) for n in (1, 2, 3, 4)] == [4, 0, 0, 0]
    context = [1, 2, 3]
    for draft_id, sparse in zip(answers[1].draft_ids, answers[1].draft_probs, strict=True):
        assert len(sparse.token_ids) == len(set(sparse.token_ids)) == 64
        assert sum(sparse.probs) == pytest.approx(1, abs=1e-5)
        assert draft_id in sparse.token_ids
        assert sparse.token_ids[0] == bench.runner.next_id(context), "the most likely id after the draft so far"
        assert sparse.probs[0] == pytest.approx(math.exp(4.5) / (math.exp(4.5) + 63), rel=1e-5)
        context.append(draft_id)
    assert bench.draft(1)[1] == answers[1].draft_ids, "a repeated request is answered the same"


def test_a_drafter_that_raises_costs_one_round(bench):
    bench.open(1, [1, 2, 3])
    bench.runner.fail_next = True
    assert bench.draft(1) == {1: []}
    assert bench.draft(1) == {1: bench.runner.complete([1, 2, 3], 4)}
    assert not bench.sink.failures


def test_errors_of_the_draft_core_are_typed(bench):
    bench.open(1, [1], "nonsense")
    bench.open(2, [1], "ngram", min_ngram="0")
    bench.open(3, [1], "ngram", typo="1")
    bench.open(4, [1], "model", typo="1")
    bench.open(5, [1])
    bench.core.apply(Commit((1, 5), 7, [1]))
    bench.core.apply(request(bench.core, 6, 4, 0))
    failures = bench.sink.failures
    for sequence_id in (1, 2, 3, 4):
        assert isinstance(failures[(1, sequence_id)], InvalidArgumentError)
    assert failures[(1, 2)].field == "drafter.settings.min_ngram"
    assert isinstance(failures[(1, 5)], FailedPreconditionError)
    assert isinstance(failures[(1, 6)], NotFoundError)


def test_closing_frees_all_pages(bench):
    for n in range(1, 5):
        bench.open(n, [n] * 10)
    bench.draft(1, 2, 3, 4)
    for n in range(1, 4):
        bench.core.apply(Close((1, n)))
    bench.core.apply(CloseLink(1))
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages
    bench.core.check_integrity()


def test_every_span_of_a_sequence_ends_including_rejected_ones(fake_runner_class):
    bench = Bench(fake_runner_class(), max_sequences=2)
    spans = {name: Mock() for name in ("taken", "repeated", "of no drafter", "one too many")}
    bench.open(1, [1], span=spans["taken"])
    bench.open(1, [1], span=spans["repeated"])
    bench.open(2, [1], drafter="unknown", span=spans["of no drafter"])
    bench.open(3, [1])
    bench.open(4, [1], span=spans["one too many"])
    bench.core.apply(CloseLink(1))
    assert {name: span.end.call_count for name, span in spans.items()} == dict.fromkeys(spans, 1)


def test_the_draft_core_enforces_deadlines_and_limits(fake_runner_class):
    bench = Bench(fake_runner_class(), max_sequences=1)
    span = Mock()
    bench.open(1, [1], deadline_s=5.0, span=span)
    bench.open(2, [1])
    assert isinstance(bench.sink.failures[(1, 2)], ResourceExhaustedError)
    assert bench.core.expire(4.0) == 5.0
    bench.core.expire(6.0)
    assert isinstance(bench.sink.failures[(1, 1)], DeadlineExceededError)
    span.set_attribute.assert_called_once_with(ERROR_TYPE, "DEADLINE_EXCEEDED")
    span.end.assert_called_once()


@pytest.mark.parametrize("draft_affects_output", [False, True])
def test_terms_reach_the_drafter_unless_tokens_depend_on_the_draft(bench, draft_affects_output):
    bench.open(1, [1, 2, 3], "ngram")
    entry = bench.core._sequences[(1, 1)].sequence
    entry.draft_affects_output = draft_affects_output
    bench.core.apply(request(bench.core, 1, 4, time.perf_counter_ns(), terms=DraftTerms(9, 0.5)))
    assert entry.terms == (None if draft_affects_output else DraftTerms(9, 0.5))
    bench.core.step()
    bench.core.apply(request(bench.core, 1, 4, time.perf_counter_ns()))
    assert entry.terms is None, "they are the last request's"


@pytest.mark.parametrize(("prob", "is_number"), [(1, True), (0.5, True), ("1", False), (10**400, False)])
def test_a_certain_draft_may_have_a_whole_probability(prob, is_number):
    drafted = Drafted(Mock(), [4], draft_probs=[SparseProbs([4], [prob])])
    with nullcontext() if is_number else pytest.raises(ValueError, match="not all are numbers"):
        drafted.check()


@pytest.mark.parametrize("key", [(4, 3), (3, 2)])
def test_a_draft_request_for_another_text_is_rejected_by_length_and_id(bench, key):
    bench.open(1, [1, 2, 3])
    bench.core.apply(RequestDraft((1, 1), *key, 4, 0))
    error = bench.sink.failures[(1, 1)]
    assert isinstance(error, FailedPreconditionError) and f"request.base_length = {key[0]}" in str(error)
    assert f"request.next_id = {key[1]}: must be 3 and 3" in str(error)


def test_a_commit_during_a_draft_request_is_taken_and_both_requests_are_answered(bench):
    bench.open(1, [1, 2, 3])
    bench.core.apply(request(bench.core, 1, 2, 0))
    bench.core.apply(Commit((1, 1), 3, [7]))
    bench.core.apply(request(bench.core, 1, 2, 0))
    while bench.core.has_work:
        bench.core.step()
    drafts = {answer.request.key: answer.drafted.draft_ids for answer in bench.sink.answers}
    assert drafts == {
        (3, 3): bench.runner.complete([1, 2, 3], 2),
        (4, 7): bench.runner.complete([1, 2, 3, 7], 2),
    }
