"""Drafters that read features receive every committed row once per forward, in order, and never a rejected one."""

import random

import pytest

from betoken.drafters.drafter import Drafted
from betoken.drafters.host.feed import FeatureFeed
from betoken.engine.sampler.verification import VerificationMode as Mode
from betoken.verify_worker.attached import AttachedDrafters
from tests.verify_worker.harness import Bench
from tests.verify_worker.oracle_drafter import PROMPT, VOCAB_SIZE, OracleDrafter


class Reader(OracleDrafter):
    """Checks each received row: the fake target's features are the row's position and the id at it."""

    def __init__(self, seed=0, **faults):
        super().__init__((), **faults)
        self.rng = random.Random(seed)
        self.known = {}
        """Per sequence: received positions, in order."""

    def open(self, sequence):
        super().open(sequence)
        self.known[sequence.key] = []

    def observe(self, spans, features):
        assert len({span.sequence for span in spans}) == len(spans)
        assert sum(span.num_rows for span in spans) == len(features)
        for span in spans:
            rows = features[span.rows, 0].tolist()
            positions = list(range(span.first_position, span.first_position + span.num_rows))
            assert [position for position, _ in rows] == positions
            assert [token_id for _, token_id in rows] == [span.sequence.ids[position] for position in positions]
            assert positions[-1] <= len(span.sequence.ids) - 2
            self.known[span.sequence.key] += positions

    def step(self):
        if self.num_late > 0:
            self.num_late -= 1
            return []
        requests, self.requests = self.requests, {}
        return [self.propose(seq, num) for seq, num in requests.items()]

    def propose(self, seq, num_tokens):
        """Some of what the target will say, among other ids, as a tree or a chain."""
        ids, parents, truth, node = [], [], list(seq.ids), -1
        for _ in range(self.rng.randrange(num_tokens + 1)):
            if self.rng.random() < 0.4 and seq.takes_trees:
                ids.append(self.rng.randrange(VOCAB_SIZE))
                parents.append(self.rng.randrange(-1, len(parents)))
            else:
                truth.append(self.target.next_id(truth))
                parents.append(node)
                node = len(ids)
                ids.append(truth[-1])
        is_chain = all(parent == index - 1 for index, parent in enumerate(parents))
        return Drafted(seq, ids, None if is_chain else parents)


def bench_with(runner, reader, whole_text=(), **options):
    runner.yields_features, reader.target = True, runner
    feed = FeatureFeed({"it": (2,)}, (2,), whole_text)
    return Bench(runner, attached=AttachedDrafters({"it": reader}, VOCAB_SIZE, 8, feed), **options)


@pytest.mark.parametrize("num_pages", [64, 32])
@pytest.mark.parametrize("num_late", [0, 3])
def test_features_of_each_committed_row_are_reported_in_order(fake_runner_class, num_pages, num_late):
    runner, reader = fake_runner_class(num_pages=num_pages), Reader(num_late=num_late)
    bench = bench_with(runner, reader)
    prompts = {n: [n, n + 1, n + 2] * 7 for n in range(1, 5)}
    for n, prompt in prompts.items():
        bench.open(n, prompt, drafter="it", max_length=64)
        bench.grant(n, len(prompt), 40, num_draft_tokens=6)
    bench.run()
    is_preempted = bench.scheduler.num_preemptions > 0
    assert is_preempted == (num_pages < 64)
    for n, prompt in prompts.items():
        told = reader.known[1, n]
        assert bench.emitted(n, {})[:40] == runner.complete(prompt, 40)
        assert sorted(set(told)) == list(range(max(told) + 1)) and max(told) >= len(prompt) + 38
        assert is_preempted or told == sorted(set(told))


@pytest.mark.parametrize("of_whole_text", [False, True])
def test_a_cached_prefix_is_recomputed_only_for_drafters_that_read_its_features(fake_runner_class, of_whole_text):
    runner, reader = fake_runner_class(), Reader()
    bench = bench_with(runner, reader, ["it"] if of_whole_text else [])
    prompt = list(range(1, 23))
    for n in (1, 2):
        bench.open(n, prompt, drafter="it")
        bench.grant(n, len(prompt), 20, num_draft_tokens=6)
        bench.run()
        assert bench.emitted(n, {})[:20] == runner.complete(prompt, 20)
    assert reader.known[1, 1][0] == 0
    assert reader.known[1, 2][0] == (0 if of_whole_text else 20)


def test_drafters_in_modes_that_wait_receive_the_tokens_committed_meanwhile(fake_runner_class):
    runner, reader = fake_runner_class(), Reader(num_late=4)
    bench = bench_with(runner, reader)
    bench.open(1, PROMPT * 5, drafter="it", mode=Mode.TYPICAL)
    bench.grant(1, 15, 20, num_draft_tokens=4)
    bench.run()
    told = reader.known[1, 1]
    assert told == list(range(len(told))) and len(told) >= 34


def test_a_drafter_that_fails_to_read_features_is_dropped_and_no_token_is_lost(fake_runner_class):
    class Blind(Reader):
        def observe(self, spans, features):
            raise RuntimeError("blind")

    runner, reader = fake_runner_class(), Blind()
    bench = bench_with(runner, reader)
    bench.open(1, PROMPT, drafter="it")
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    bench.run()
    assert bench.emitted(1, {})[:20] == runner.complete(PROMPT, 20)
    assert not bench.sink.failures
    assert reader.num_opened == reader.num_closed == 3
