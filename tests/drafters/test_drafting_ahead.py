"""Drafting ahead in the host: a hit costs no forward, a miss one draft, and requests of any sequence go first."""

import random

import pytest

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import Request
from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.sampling import SamplingParams

PROMPT = [1, 2, 3]


@pytest.fixture
def runner_class(unsure_runner_class):
    return unsure_runner_class


class Bench:
    """A host with one model drafter, and its sink: the last draft of each sequence."""

    def __init__(self, runner, max_rows=16, is_fused=False):
        self.runner, self.drafts, self.lost_keys, self.pushed = runner, {}, [], []
        self.model = ModelDrafter(runner, max_rows, 6)
        drafters = {"model": self.model}
        self.host = DrafterHost({"fused": FusedDrafter(drafters), **drafters} if is_fused else drafters, self)

    def drafted(self, answers):
        self.pushed += [answer for answer in answers if answer.is_ahead]
        self.drafts |= {answer.key: answer.drafted for answer in answers if not answer.is_ahead}

    def lost(self, hosted):
        self.lost_keys.append(hosted.key)

    def open(self, number=1, prompt=PROMPT, eos_token_ids=(), **fields):
        params = SamplingParams(temperature=0.0, eos_token_ids=eos_token_ids, ignore_eos=not eos_token_ids)
        return self.host.open(DraftSequence((1, number), params, prompt, [], 200, **fields), self.host.names[0])

    def request(self, hosted, num_tokens=3, num_outcomes=3):
        self.host.request(hosted, Request(num_tokens, num_tokens, num_outcomes=num_outcomes))

    def draft(self, hosted, num_tokens=3, num_outcomes=3):
        """The draft after all committed ids, and the forwards that it took."""
        num_before = len(self.runner.forwards)
        self.request(hosted, num_tokens, num_outcomes)
        while self.host.has_work:
            self.step()
        drafted = self.drafts[hosted.key]
        assert drafted.draft_ids == self.runner.complete(hosted.sequence.ids, num_tokens)
        return drafted, len(self.runner.forwards) - num_before

    def step(self):
        self.host.step()
        self.host.check_integrity()
        for kv in self.model._caches.values():
            assert self.runner.held_ids(kv.page_ids, len(kv.kv_ids)) == kv.kv_ids

    def draft_ahead(self, num_steps=100):
        while self.host.has_ahead_work and num_steps:
            self.step()
            num_steps -= 1


def outcome(bench, hosted, num_accepted, is_second=False):
    """The ids committed if so many ids are accepted, and the model's own or second token follows."""
    ids = bench.drafts[hosted.key].draft_ids[:num_accepted]
    (next_id,) = bench.runner.complete([*hosted.sequence.ids, *ids], 1)
    return [*ids, (next_id + is_second) % bench.runner.vocab_size]


@pytest.mark.parametrize(("num_accepted", "is_second"), [(3, False), (0, True), (1, True)])
def test_a_draft_for_a_likely_outcome_is_ready_without_a_forward(runner_class, num_accepted, is_second):
    bench = Bench(runner_class())
    hosted = bench.open()
    bench.draft(hosted)
    for _ in range(6):
        bench.draft_ahead()
        bench.host.commit(hosted, outcome(bench, hosted, num_accepted, is_second))
        drafted, num_forwards = bench.draft(hosted)
        assert num_forwards == 0 and (drafted.num_ahead_ids, drafted.num_ahead_tokens) == (3, 9)
    bench.host.close(hosted)
    assert bench.runner.page_table.num_free == bench.runner.page_table.num_pages


@pytest.mark.parametrize("is_fused", [False, True])
def test_drafts_made_ahead_are_pushed_with_the_keys_of_their_outcomes(runner_class, is_fused):
    bench = Bench(runner_class(), is_fused=is_fused)
    hosted = bench.open()
    for num_accepted in (3, 1, 0):
        bench.draft(hosted)
        bench.draft_ahead()
        bench.host.commit(hosted, outcome(bench, hosted, num_accepted, is_second=num_accepted < 3))
        answer = bench.draft(hosted)[0]
        pushed, bench.pushed = {one.request.key: one.drafted for one in bench.pushed}, []
        assert len(pushed) == (0 if is_fused else 3)
        if not is_fused:  # whose next draft may be another source's
            found = pushed[len(hosted.sequence.ids), hosted.sequence.ids[-1]]
            assert (found.draft_ids, found.num_ahead_tokens) == (answer.draft_ids, answer.num_ahead_tokens)


def test_the_outcomes_are_drafted_in_one_batch_and_in_as_many_forwards_as_one_draft(runner_class):
    bench = Bench(runner_class())
    hosted = bench.open()
    bench.draft(hosted)
    bench.draft_ahead()
    assert bench.runner.forwards == [3, 1, 1, 1, 3, 3, 3]


def test_one_outcome_is_the_full_acceptance_if_that_is_the_likeliest(fake_runner_class):
    bench = Bench(fake_runner_class())
    hosted = bench.open()
    bench.draft(hosted, num_outcomes=1)
    bench.draft_ahead()
    assert bench.runner.forwards == [3, 1, 1, 1, 1, 1, 1]
    bench.host.commit(hosted, outcome(bench, hosted, 3))
    assert bench.draft(hosted)[0].num_ahead_ids == 3


def test_a_draft_begun_ahead_is_completed_on_request(runner_class):
    bench = Bench(runner_class())
    hosted = bench.open()
    bench.draft(hosted)
    bench.draft_ahead(num_steps=2)
    bench.host.commit(hosted, outcome(bench, hosted, 0, is_second=True))
    drafted, num_forwards = bench.draft(hosted)
    assert (num_forwards, drafted.num_ahead_ids, drafted.num_ahead_tokens) == (2, 1, 3)


@pytest.mark.parametrize("num_steps", [0, 1, 100])
def test_a_miss_is_drafted_again(runner_class, num_steps):
    bench = Bench(runner_class())
    hosted = bench.open()
    bench.draft(hosted)
    bench.draft_ahead(num_steps)
    bench.host.commit(hosted, [50])
    drafted, num_forwards = bench.draft(hosted)
    assert (num_forwards, drafted.num_ahead_ids) == (3, 0)


def test_ids_decided_without_the_draft_leave_the_rest_of_it_ready(runner_class):
    bench = Bench(runner_class())
    hosted = bench.open()
    drafted, _ = bench.draft(hosted)
    bench.host.commit(hosted, drafted.draft_ids[:1])
    bench.host.commit(hosted, drafted.draft_ids[1:2])
    assert bench.draft(hosted)[0].num_ahead_ids == 1


def test_requests_of_other_sequences_go_before_drafting_ahead(runner_class):
    bench = Bench(runner_class())
    first, second = bench.open(1), bench.open(2, [7, 8, 9, 10, 11])
    bench.draft(first)
    bench.draft_ahead(num_steps=1)
    del bench.runner.forwards[:]
    bench.draft(second)
    assert bench.runner.forwards == [5, 1, 1] and bench.host.has_ahead_work
    bench.draft_ahead()
    for hosted in (first, second):
        bench.host.commit(hosted, outcome(bench, hosted, 1, is_second=True))
        assert bench.draft(hosted)[1] == 0


def test_a_closed_sequence_is_not_drafted_for_ahead(runner_class):
    bench = Bench(runner_class())
    hosted = bench.open()
    bench.draft(hosted)
    bench.draft_ahead(num_steps=2)
    bench.host.close(hosted)
    assert not bench.host.has_ahead_work and bench.runner.page_table.num_free == bench.runner.page_table.num_pages


def test_a_fault_of_drafting_ahead_costs_no_draft(runner_class, caplog):
    bench = Bench(runner_class())
    hosted = bench.open()
    bench.draft(hosted)
    bench.runner.fail_next = True
    bench.draft_ahead()
    assert "drafter model failed" in caplog.text and not bench.lost_keys
    assert bench.draft(hosted)[0].num_ahead_ids is None


@pytest.mark.parametrize("fields", [{"draft_affects_output": True}, {"wants_probs": True}, {}])
def test_nothing_is_drafted_ahead_unless_requested_or_if_drafts_choose_tokens(runner_class, fields):
    bench = Bench(runner_class())
    hosted = bench.open(**fields)
    bench.request(hosted, num_outcomes=3 if fields else 0)
    while bench.host.has_work:
        bench.step()
    assert not bench.host.has_ahead_work
    bench.host.commit(hosted, [50])
    assert bench.draft(hosted, num_outcomes=0)[0].num_ahead_ids is None


def test_nothing_is_drafted_ahead_of_an_answers_end(runner_class):
    bench = Bench(runner_class())
    ids = bench.runner.complete(PROMPT, 3)
    bench.request(hosted := bench.open(eos_token_ids=(ids[1],)))
    while bench.host.has_work:
        bench.step()
    assert bench.drafts[hosted.key].draft_ids == ids[:2] and not bench.host.has_ahead_work


def test_fused_drafts_ahead_by_its_sources(runner_class):
    bench = Bench(runner_class(), is_fused=True)
    hosted = bench.open()
    bench.draft(hosted)
    bench.draft_ahead()
    bench.host.commit(hosted, outcome(bench, hosted, 1, is_second=True))
    drafted, num_forwards = bench.draft(hosted)
    assert (num_forwards, drafted.num_ahead_ids) == (0, 3)


@pytest.mark.parametrize("seed", range(12))
def test_drafts_are_the_models_after_any_commits_and_steps_ahead(runner_class, seed):
    rng = random.Random(seed)
    bench = Bench(runner_class(num_pages=rng.choice([18, 40])), max_rows=rng.choice([5, 16]))
    sequences = [bench.open(number, [rng.randrange(97) for _ in range(rng.randrange(1, 9))]) for number in range(3)]
    for _ in range(40):
        hosted = rng.choice(sequences)
        bench.request(hosted, rng.randrange(1, 5), rng.randrange(4))
        while bench.host.has_work:
            bench.step()
        drafted = bench.drafts[hosted.key]
        expected = bench.runner.complete(hosted.sequence.ids, len(drafted.draft_ids))
        assert drafted.draft_ids == expected
        bench.draft_ahead(rng.randrange(6))
        for _ in range(rng.choice([1, 1, 2])):
            num_accepted = rng.randrange(4)
            ids = outcome(bench, hosted, num_accepted, rng.random() < 0.5) if rng.random() < 0.8 else [50]
            bench.host.commit(hosted, ids)
    assert not bench.lost_keys


def test_a_count_of_ids_drafted_ahead_beyond_the_draft_is_a_fault():
    with pytest.raises(ValueError, match="num_ahead_ids: 2 of 1 draft ids"):
        Drafted(None, [5], num_ahead_ids=2).check()
