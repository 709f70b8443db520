"""Sources that answer at once are judged by shadow drafts, which are compared with the text and never verified."""

import random

import pytest

from betoken.common.economy.terms import DraftTerms
from betoken.draft_worker.commands import Commit
from betoken.drafters.drafter import Drafted
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.fused.shadow_draft import ShadowDraft
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.immediate import ImmediateDrafter
from betoken.rpc.link.commands import Close
from tests.draft_worker.harness import request
from tests.drafters.harness import Clocked, NamedDrafter


class Knowing(ImmediateDrafter):
    """Answers at once, and knows what the target says in some sequences."""

    def propose(self, sequence, num_tokens):
        return Drafted(sequence, [9] * num_tokens if sequence.ids[0] == 5 else [])


class Shadowed(Clocked):
    """A source of 3 tokens a round, whatever the text, and an immediate source."""

    def drafters(self):
        self.now_ns = 0
        self.steady, self.knowing = NamedDrafter(3), Knowing()
        sources = {"steady": self.steady, "knowing": self.knowing}
        return {**sources, "fused": FusedDrafter(sources, lambda: self.now_ns)}

    def round(self, sequence_id):
        """Whether the source that answers at once was asked; a round takes a second."""
        draft = self.draft(sequence_id, num_tokens=4)[sequence_id]
        while self.core.has_work:
            self.core.step()
        self.now_ns += 1_000_000_000
        entry = self.core._sequences[(1, sequence_id)].sequence
        num_tokens = 3 if draft == [3] else len(draft) + 1
        self.core.apply(Commit((1, sequence_id), len(entry.ids), [9] * num_tokens))
        return draft != [3]


def test_an_immediate_source_is_measured_by_shadow_drafts_without_a_request(fake_runner_class):
    bench = Shadowed(fake_runner_class())
    bench.open(1, [6], "fused", max_length=10_000)
    asked = [bench.round(1) for _ in range(100)]
    assert sum(asked[:10]) >= 1 and sum(asked[10:]) == 0, "it brings 1 token, is timed once and not soon again"
    bench.open(2, [5], "fused", max_length=10_000)
    asked = [bench.round(2) for _ in range(60)]
    assert sum(asked[20:]) >= 36, "here it brings 5, but for two trials of two rounds"
    bench.core.apply(Close((1, 1)))
    bench.core.apply(Close((1, 2)))
    assert not bench.core.has_work and not bench.sink.failures


def test_a_draft_under_terms_is_credited_with_more_than_the_number_asked_for(fake_runner_class):
    bench = Shadowed(fake_runner_class())
    bench.knowing.propose = lambda sequence, num_tokens: Drafted(sequence, [9] * sequence.terms.max_tokens)
    bench.open(1, [5], "fused", max_length=10_000)
    num_asked = 0
    for _ in range(100):
        bench.core.apply(request(bench.core, 1, 4, 0, terms=DraftTerms(16)))
        while bench.core.has_work:
            bench.core.step()
        is_asked = bench.sink.answers.pop().drafted.draft_ids != [3]
        num_asked += is_asked
        bench.now_ns += (3 if is_asked else 1) * 1_000_000_000
        entry = bench.core._sequences[(1, 1)].sequence
        bench.core.apply(Commit((1, 1), len(entry.ids), [9] * (17 if is_asked else 3)))
    assert num_asked > 85, "17 tokens in three seconds to 3 in one"


@pytest.mark.parametrize("report", [random.Random(1).random, list])
def test_a_confidence_that_is_not_an_integer_is_ignored(fake_runner_class, report):
    bench = Shadowed(fake_runner_class())
    bench.knowing.confidence = lambda sequence: report()
    bench.open(1, [6], "fused", max_length=10_000)
    asked = [bench.round(1) for _ in range(100)]
    assert sum(asked[:10]) >= 1 and sum(asked[10:]) == 0, "as without one"
    assert not bench.sink.failures


class Sure(ImmediateDrafter):
    """Knows what the target says now and then, and knows when it knows."""

    is_sure = False

    def confidence(self, sequence):
        return 3 * self.is_sure

    def propose(self, sequence, num_tokens):
        return Drafted(sequence, [9] * (num_tokens if self.is_sure else 1))


def test_a_shadow_draft_that_terms_leave_empty_is_not_a_round(fake_runner_class):
    bench = Shadowed(fake_runner_class())
    bench.open(1, [6], "fused", max_length=10_000)
    source = bench.core.host._drafters["fused"]._open[bench.core._sequences[(1, 1)].sequence].sources["knowing"]
    for terms, is_counted in ((None, True), (DraftTerms(9), False)):
        bench.core.apply(request(bench.core, 1, 4, 0, terms=terms))
        source.num_wanted, source.shadow = 4, None
        bench.core.host._drafters["fused"]._draft_shadow("knowing", source)
        assert (source.shadow is not None) == is_counted
        while bench.core.has_work:
            bench.core.step()


class Switching(Clocked):
    """A source of 2 tokens a round, and an immediate source of 5 or 1."""

    def drafters(self):
        self.now_ns, self.rng = 0, random.Random(1)
        self.steady, self.switching = NamedDrafter(3), Sure()
        sources = {"steady": self.steady, "switching": self.switching}
        return {**sources, "fused": FusedDrafter(sources, lambda: self.now_ns)}

    def outcome(self, draft):
        """Tokens and seconds of a round with that draft."""
        return 2 if draft == [3] else 5 if self.switching.is_sure else 1, 1.0

    def round(self, sequence_id):
        """Whether the source that answers at once was asked, and whether it was sure."""
        self.switching.is_sure = self.rng.random() < 0.5
        draft = self.draft(sequence_id, num_tokens=4)[sequence_id]
        while self.core.has_work:
            self.core.step()
        num_tokens, seconds = self.outcome(draft)
        self.now_ns += int(1e9 * seconds)
        says = 9 if self.switching.is_sure else 8
        entry = self.core._sequences[(1, sequence_id)].sequence
        self.core.apply(Commit((1, sequence_id), len(entry.ids), [says] * num_tokens))
        return draft != [3], self.switching.is_sure


class Timed(Switching):
    """One drafts in a second; the other 5 tokens in 4 seconds if it is sure, else 1 in a third of one."""

    def outcome(self, draft):
        return (2, 1.0) if draft == [3] else (5, 4.0) if self.switching.is_sure else (1, 1 / 3)


def test_rounds_of_different_confidence_take_different_times(fake_runner_class):
    bench = Timed(fake_runner_class())
    bench.open(1, [5], "fused", max_length=10_000)
    rounds = [bench.round(1) for _ in range(2000)][-400:]
    assert sum(asked != is_sure for asked, is_sure in rounds) / len(rounds) > 0.9, "short rounds without a draft pay"


def test_a_source_gets_requests_when_its_confidence_is_high(fake_runner_class):
    bench = Switching(fake_runner_class())
    bench.open(1, [5], "fused", max_length=10_000)
    rounds = [bench.round(1) for _ in range(300)][20:]
    assert {is_sure for _, is_sure in rounds} == {True, False}
    assert sum(asked == is_sure for asked, is_sure in rounds) / len(rounds) > 0.95
    bench.switching.is_sure = True
    bench.open(2, [5], "fused", max_length=10_000)
    rounds = [bench.round(2) for _ in range(20)]
    assert sum(asked == is_sure for asked, is_sure in rounds) >= 19, "from the first round: others taught it"


class Unsure(Sure):
    def confidence(self, sequence):
        raise RuntimeError("out of order")


def test_a_confidence_that_raises_costs_no_draft(fake_runner_class):
    bench = Switching(fake_runner_class())
    bench.switching = Unsure()
    sources = {"steady": bench.steady, "switching": bench.switching}
    bench.core.host = DrafterHost({**sources, "fused": FusedDrafter(sources, lambda: bench.now_ns)}, bench.core)
    bench.open(1, [5], "fused", max_length=10_000)
    num_answers = 0
    for _ in range(40):
        bench.round(1)
        num_answers += sum(bool(answer.drafted.draft_ids) for answer in bench.sink.answers)
    assert num_answers == 40
    assert not bench.sink.failures


class Broken(Knowing):
    def propose(self, sequence, num_tokens):
        raise RuntimeError("out of order")


class Shy(Knowing):
    """Does not take sequences in."""

    def open(self, sequence):
        raise RuntimeError("out of order")


@pytest.mark.parametrize("source_class", [Broken, Shy])
def test_a_source_known_by_shadow_drafts_that_raises_costs_rounds_at_most(fake_runner_class, source_class):
    bench = Shadowed(fake_runner_class())
    sources = {"steady": bench.steady, "knowing": source_class()}
    bench.core.host = DrafterHost({**sources, "fused": FusedDrafter(sources, lambda: bench.now_ns)}, bench.core)
    bench.open(1, [6], "fused", max_length=10_000)
    drafts = [bench.round(1) for _ in range(200)]
    assert drafts[-60:].count(False) > 55
    assert not bench.sink.failures


class Forgetful(NamedDrafter):
    """Raises, and has forgotten whom it owed an answer."""

    def step(self):
        self.waiting = []
        raise RuntimeError("out of order")


def test_a_source_that_raises_beside_a_waiting_shadow_draft_costs_one_round(fake_runner_class):
    bench = Shadowed(fake_runner_class())
    sources = {"steady": Forgetful(3), "knowing": bench.knowing}
    bench.core.host = DrafterHost({**sources, "fused": FusedDrafter(sources, lambda: bench.now_ns)}, bench.core)
    bench.open(1, [6], "fused", max_length=10_000)
    assert bench.draft(1) == {1: []}
    assert not bench.sink.failures


@pytest.mark.parametrize(
    ("draft_ids", "parents", "commits", "expected"),
    [
        ([1, 2, 3], None, [[1, 2], [4]], 3),
        ([1, 2, 3], None, [[1, 2, 3, 4, 5]], 4),
        ([], None, [[1]], 1),
        ([1, 5, 2, 6], [-1, -1, 0, 1], [[5], [6], [6]], 3),
        ([1, 1, 2], [-1, -1, 0], [[1, 2, 9]], 3),
        ([1, 2], None, [[1], [2]], None),
    ],
)
def test_a_shadow_draft_counts_the_tokens_that_verification_would_have_accepted(draft_ids, parents, commits, expected):
    shadow = ShadowDraft(Drafted(None, draft_ids, parents))
    assert [shadow.follow(ids) for ids in commits][-1] == expected
