"""`fused` attached: it chooses among the other attached drafters, whose faults and features stay theirs."""

import pytest
import torch

from betoken.drafters.drafter import Drafted
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.host.feed import CommittedRows, FeatureFeed
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.drafters.registry import check_attached
from betoken.engine.sampler.verification import VerificationMode as Mode
from betoken.verify_worker.attached import AttachedDrafters
from tests.verify_worker.harness import Bench
from tests.verify_worker.oracle_drafter import PROMPT, VOCAB_SIZE, OracleDrafter


def bench_with(runner, oracle, feed=None, **options):
    sources = {"oracle": oracle, "ngram": NgramDrafter()}
    drafters = {"fused": FusedDrafter(sources), **sources}
    return Bench(runner, attached=AttachedDrafters(drafters, VOCAB_SIZE, 8, feed), **options)


def sources_of(bench):
    return {source for decision in bench.sink.decisions if decision.attached for source in decision.attached.sources}


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("is_priced", [False, True])
def test_its_rounds_give_the_plain_tokens_from_several_sources(fake_runner_class, num_draft_tokens, is_priced):
    runner = fake_runner_class()
    prompt = [1, 2, 3] * 7
    truth = runner.complete(prompt, 120)
    bench = bench_with(runner, OracleDrafter(truth))
    bench.open(1, prompt, drafter="fused")
    bench.grant(1, len(prompt), 100, num_draft_tokens, is_priced)
    bench.run()
    assert bench.emitted(1, {})[:100] == truth[:100]
    assert "oracle" in sources_of(bench) <= {"oracle", "ngram"}


def test_sequences_with_sources_of_their_own_go_on_beside_it(fake_runner_class):
    runner = fake_runner_class(num_pages=90)
    truth = runner.complete(PROMPT, 60)
    bench = bench_with(runner, OracleDrafter(truth))
    for n, drafter in enumerate(("fused", "oracle", "ngram", "fused"), start=1):
        bench.open(n, PROMPT, drafter=drafter)
        bench.grant(n, len(PROMPT), 50, 4)
    bench.run()
    for n in range(1, 5):
        assert bench.emitted(n, {})[:50] == truth[:50]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_late_source_is_waited_for_only_where_tokens_depend_on_drafts(fake_runner_class, mode):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench = bench_with(runner, OracleDrafter(truth, num_late=5))
    bench.open(1, PROMPT, drafter="fused", mode=mode)
    bench.grant(1, len(PROMPT), 20, 4)
    bench.run()
    assert bench.emitted(1, {})[:20] == truth[:20]
    failed = [decision.attached.is_failed for decision in bench.sink.decisions if decision.attached is not None]
    assert not any(failed)


def test_a_source_that_fails_costs_drafts_and_no_tokens(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench = bench_with(runner, OracleDrafter(truth, fault=RuntimeError("source")))
    bench.open(1, PROMPT, drafter="fused")
    bench.grant(1, len(PROMPT), 50, 4)
    bench.run()
    assert bench.emitted(1, {})[:50] == truth[:50] and not bench.sink.failures


class ReadingDrafter(OracleDrafter):
    """Records the rows that it receives."""

    def __init__(self, truth):
        super().__init__(truth)
        self.read = []

    def observe(self, spans, features):
        for span in spans:
            assert span.sequence.key == (1, 1) and span.sequence.ids[-1] is not None
            self.read += [(span.first_position + row, features[span.rows][row].item()) for row in range(span.num_rows)]


def test_a_source_reads_features_of_sequences_that_it_holds(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    reading = ReadingDrafter(truth)
    bench = bench_with(runner, reading, FeatureFeed({"oracle": [0]}, [0]))
    attached = bench.core._attached
    bench.open(1, PROMPT, drafter="fused")
    rows = {(1, 1): (3, [1, 0])}
    committed = CommittedRows(torch.tensor([[7.0], [8.0]]), rows)
    attached.observe(committed)
    assert reading.read == [], "it was not asked yet, and holds nothing"
    bench.grant(1, len(PROMPT), 30, 4)
    bench.run()
    attached.observe(committed)
    assert reading.read == [(3, 8.0), (4, 7.0)]


def test_it_needs_others_to_choose_among():
    with pytest.raises(ValueError, match="`fused` chooses among the others"):
        check_attached(["fused", "ngram"])
    check_attached(["fused", "ngram", "medusa"])


def test_an_unrequested_draft_is_a_fault(fake_runner_class):
    class Unasked(OracleDrafter):
        def step(self):
            drafts = super().step()
            return [*drafts, *(Drafted(drafted.sequence, []) for drafted in drafts)]

    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 30)
    bench = bench_with(runner, Unasked(truth))
    bench.open(1, PROMPT, drafter="oracle")
    bench.grant(1, len(PROMPT), 20, 4)
    bench.run()
    assert bench.emitted(1, {})[:20] == truth[:20]
