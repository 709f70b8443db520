"""Drafts of real models, PARD models among them, that were begun ahead equal drafts made on request, under noise and
rules."""

import math
import random
import time

import pytest

from betoken.draft_worker.commands import Commit, Open
from betoken.draft_worker.core import DraftCore
from betoken.drafters.model import ahead as ahead_drafts
from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import PARAMS, RecordingSink, request
from tests.drafters.parallel import save_pard
from tests.engine.tiny import save_tiny


@pytest.fixture(scope="module", params=[save_tiny, save_pard])
def directory(tmp_path_factory, request):
    return request.param(tmp_path_factory.mktemp("tiny"), "llama")


class Bench:
    """A core with one model drafter that drafts ahead for a number of outcomes."""

    def __init__(self, directory, num_outcomes, max_rows=40):
        self.runner = load_runner(EngineConfig(directory, num_pages=200, compile="off", self_check=False))
        self.sink, self.num_outcomes = RecordingSink(), num_outcomes
        self.model = ModelDrafter(self.runner, max_rows, 8, mask_token_id=self.runner.info.mask_token_id)
        self.core = DraftCore({"model": self.model}, [self.runner.page_table], self.sink, 8)

    def draft(self, n, num_tokens):
        self.sink.answers.clear()
        self.core.apply(request(self.core, n, num_tokens, time.perf_counter_ns(), num_outcomes=self.num_outcomes))
        while not self.sink.answers:
            self.core.step()
        return self.sink.answers[0].drafted

    def draft_ahead(self, num_steps):
        while self.core.has_work and num_steps:
            self.core.step()
            self.core.check_integrity()
            num_steps -= 1

    def outcome(self, n, rng):
        """The ids of a random outcome that was drafted for; of a random text without any."""
        (ahead,) = [kv.ahead for sequence, kv in self.model._caches.items() if sequence.key == (1, n)]
        outcomes = ahead._outcomes if ahead is not None and ahead.is_begun else []
        chosen = rng.choice(outcomes) if outcomes else None
        return ahead.path_ids(chosen)[: chosen.num_accepted + 1] if chosen else [rng.randrange(101)]


@pytest.mark.parametrize(("num_outcomes", "max_rows"), [(1, 40), (3, 40), (3, 7)])
def test_drafts_begun_ahead_equal_drafts_made_on_request(directory, num_outcomes, max_rows, monkeypatch):
    monkeypatch.setattr(ahead_drafts, "_LEAST_SHARE", -math.inf)  # a random model is sure of nothing
    rng = random.Random(num_outcomes)
    ahead, plain = Bench(directory, num_outcomes, max_rows), Bench(directory, 0)
    texts = {n: [rng.randrange(101) for _ in range(rng.randrange(2, 40))] for n in PARAMS}
    for bench in (ahead, plain):
        for n, ids in texts.items():
            bench.core.apply(Open((1, n), PARAMS[n], tuple(ids), (), 400))
    num_used = dict.fromkeys(PARAMS, 0)
    for _ in range(60):
        n, num_tokens = rng.choice(list(PARAMS)), rng.randrange(2, 6)
        drafted, expected = ahead.draft(n, num_tokens), plain.draft(n, num_tokens)
        assert drafted.draft_ids == expected.draft_ids and expected.num_ahead_ids is None
        num_used[n] += drafted.num_ahead_ids or 0
        ahead.draft_ahead(rng.choice([0, 2, 20]))
        ids = ahead.outcome(n, rng) if rng.random() < 0.8 else [*drafted.draft_ids[:1], rng.randrange(101)]
        for bench in (ahead, plain):
            bench.core.apply(Commit((1, n), len(texts[n]), ids))
        texts[n] += ids
    assert all(num_used.values()), num_used
    for bench in (ahead, plain):
        bench.core.apply(CloseLink(1))
        assert bench.runner.page_table.num_free == bench.runner.page_table.num_pages and not bench.sink.failures
