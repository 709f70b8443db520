"""The load that a verify worker reports names its speed and the price of a row; a wrong price is found out."""

from types import SimpleNamespace

import pytest

from betoken.drafters.drafter import Drafted
from betoken.engine.bring_up.step_costs import StepCost
from betoken.verify_worker import core, verify
from tests.verify_worker.harness import Bench
from tests.verify_worker.oracle_drafter import PROMPT, OracleDrafter, bench_with

MS = 1_000_000
NUM_TOKENS = 190


def test_the_load_reports_speed_and_row_price(fake_runner_class):
    dear = [StepCost(rows, 512, 1_000_000_000 * rows) for rows in (1, 32)]
    bench = Bench(fake_runner_class(), step_costs=dear)
    bench.open(1, [1, 2, 3])
    bench.block(1, 3, [], num_plain_steps=20)  # alike: the price is the table's, at any pace
    bench.run()
    assert bench.sink.load.tokens_per_s > 0 and bench.sink.load.row_price > 0


class SureDrafter(OracleDrafter):
    """Expects the token `d` ahead to be accepted by `share` ** d, and drafts what pays; not for its first sequence."""

    def __init__(self, truth, share):
        super().__init__(truth)
        self.share = share

    def step(self):
        requests, self.requests = self.requests, {}
        return [Drafted(seq, self._draft(seq, num_tokens)) for seq, num_tokens in requests.items()]

    def _draft(self, seq, num_tokens):
        max_tokens, price = (seq.terms.max_tokens, seq.terms.row_price) if seq.terms else (num_tokens, 0.0)
        ids = self.truth[len(seq.output_ids) :][:max_tokens]
        return [i for d, i in enumerate(ids, 1) if self.share**d > price] if self.num_opened > 1 else []


class Served:
    """A worker whose forwards take `row_ns` for each row and 1 ms, by a clock that only they move."""

    def __init__(self, monkeypatch, runner, row_ns, table, share=0.9):
        self.now_ns, self.runner, self.row_ns = 1, runner, row_ns
        self.truth, self._forward = runner.complete(PROMPT, NUM_TOKENS), runner.forward
        guess = self.truth if share > 0.5 else [(i + 1) % runner.vocab_size for i in self.truth]
        self.bench = bench_with(runner, SureDrafter(guess, share), step_costs=table)
        self.num_opened = 0
        monkeypatch.setattr(runner, "forward", self.forward)
        clock = SimpleNamespace(
            perf_counter_ns=lambda: self.now_ns,
            perf_counter=lambda: self.now_ns * 1e-9,
            monotonic=lambda: self.now_ns * 1e-9,
        )
        for module in (core, verify):
            monkeypatch.setattr(module, "time", clock)

    def forward(self, segments):
        self.now_ns += MS + self.row_ns * sum(len(segment.ids) for segment in segments)
        return self._forward(segments)

    def answers(self, num_answers, num_draft_tokens=5):
        """One after another; tokens a forward, and milliseconds."""
        began_ns, num_before = self.now_ns, len(self.runner.forwards)
        for _ in range(num_answers):
            self.num_opened += 1
            n = self.num_opened
            self.bench.open(n, PROMPT, drafter="it", max_length=len(PROMPT) + NUM_TOKENS)
            self.bench.grant(n, len(PROMPT), NUM_TOKENS, num_draft_tokens, is_priced=True)
            self.bench.run()
            assert self.bench.emitted(n, {}) == self.truth
            self.bench.close(n)
        num_forwards = len(self.runner.forwards) - num_before
        return NUM_TOKENS * num_answers / num_forwards, (self.now_ns - began_ns) / MS


def table(row_ns):
    return [StepCost(rows, 512, MS + row_ns * rows) for rows in (1, 2, 4, 8, 16, 32)]


@pytest.mark.parametrize("wrong", [10, 100, 1000])
def test_after_a_busy_start_drafts_soon_follow_the_right_row_price(monkeypatch, fake_runner_class, wrong):
    """The first answer has nothing to draft, so the wrong price is the only one known."""
    row_ns = 20_000
    served = Served(monkeypatch, fake_runner_class(), row_ns, table(row_ns))
    served.answers(4)
    usual = served.answers(4)[0]
    served = Served(monkeypatch, fake_runner_class(), row_ns, table(wrong * row_ns))
    served.answers(4)
    assert served.answers(4)[0] == pytest.approx(usual, rel=0.1) and usual > 4.0


def test_trials_at_a_high_row_price_cost_one_per_cent(monkeypatch, fake_runner_class):
    """Ten rows take ten times as long as one, and no draft is ever right."""
    row_ns = 10 * MS
    plain_ms = Served(monkeypatch, fake_runner_class(), row_ns, table(row_ns)).answers(8, num_draft_tokens=0)[1]
    served = Served(monkeypatch, fake_runner_class(), row_ns, table(row_ns), share=0.01)
    took_ms = served.answers(8)[1]
    assert plain_ms < took_ms < 1.01 * plain_ms
