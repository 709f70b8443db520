"""A drafter that raises, or answers nonsense, costs its own sequence at most; every fault is logged."""

import pytest

from betoken.draft_worker.commands import Commit
from betoken.draft_worker.core import DraftCore
from betoken.drafters.drafter import Drafted
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.rpc.link.commands import Close, CloseLink
from tests.draft_worker.harness import Bench


@pytest.fixture
def bench(fake_runner_class):
    return Bench(fake_runner_class())


class FaultyDrafter:
    """Drafts the last id again, and raises or returns nonsense on request."""

    def __init__(self):
        self.fault, self.requests, self.open_keys = "", {}, set()

    @property
    def has_work(self):
        if self.fault == "has_work":
            raise RuntimeError("no has_work today")
        return bool(self.requests)

    def _maybe_raise(self, where):
        if self.fault == where:
            self.fault = ""
            raise RuntimeError(f"no {where} today")

    def open(self, sequence):
        self._maybe_raise("open")
        assert sequence.key not in self.open_keys
        self.open_keys.add(sequence.key)

    def commit(self, sequence, ids):
        self._maybe_raise("commit")

    def request(self, sequence, num_tokens):
        self._maybe_raise("request")
        self.requests[sequence] = num_tokens

    def close(self, sequence):
        self.requests.pop(sequence, None)
        self.open_keys.discard(sequence.key)
        self._maybe_raise("close")

    def step(self):
        self._maybe_raise("step")
        requests, self.requests = self.requests, {}
        if self.fault == "twice":
            self.fault, requests = "", [*requests.items()] * 2
            return [Drafted(seq, []) for seq, _ in requests]
        return [Drafted(seq, *self._nodes(seq, num_tokens)) for seq, num_tokens in requests.items()]

    def _nodes(self, seq, num_tokens):
        fault, self.fault = self.fault, ""
        ids = [seq.ids[-1]] * num_tokens
        return {
            "negative id": ([-1], None, None),
            "no id": (["x"], None, None),
            "bad parents": (ids, [0] * num_tokens, None),
            "few parents": (ids, [-1], None),
            "real parents": (ids, [index - 1.0 for index in range(num_tokens)], None),
            "few sources": ([*ids, 1], None, ["a"] * num_tokens),
            "nameless source": (ids, None, [""] * num_tokens),
            "long source": (ids, None, ["s" * 65] * num_tokens),
            "no probs": (ids, None, None, [{1: 1.0}] * num_tokens),
            "negative count": (ids, None, None, (), -1),
            "true id": ([True], None, None),
            "true parent": ([1, 2, 3], [-1, 0, True], None),
            "numbered source": ([1], None, [1]),
            "true count": (ids, None, None, (), True),
        }.get(fault, (ids, None, None))

    def check_integrity(self):
        pass


@pytest.mark.parametrize(
    "fault",
    [
        *("commit", "request", "step", "twice", "negative id", "no id", "bad parents", "few parents"),
        *("real parents", "few sources", "nameless source", "long source", "no probs", "negative count"),
        *("true id", "true parent", "numbered source", "true count"),
    ],
)
def test_any_fault_of_a_drafter_costs_one_draft_and_is_logged(bench, caplog, fault):
    drafter = FaultyDrafter()
    bench.core = DraftCore({"model": drafter}, [], bench.sink, 8)
    bench.open(1, [1, 2, 3])
    assert bench.draft(1, num_tokens=3) == {1: [3, 3, 3]}
    drafter.fault = fault
    bench.core.apply(Commit((1, 1), 3, [5]))
    assert bench.draft(1, num_tokens=3) == {1: [5, 5, 5] if fault == "commit" else []}
    assert "drafter model failed" in caplog.text
    assert bench.draft(1, num_tokens=3) == {1: [5, 5, 5]}
    assert not bench.sink.failures and drafter.open_keys == {(1, 1)}


def test_an_invalid_draft_costs_no_other_sequence_of_its_drafter(bench, caplog):
    drafter = FaultyDrafter()
    bench.core = DraftCore({"model": drafter}, [], bench.sink, 8)
    for n in (1, 2, 3):
        bench.open(n, [n, n])
    drafter.fault = "negative id"
    assert bench.draft(2, 1, 3, num_tokens=2) == {2: [], 1: [1, 1], 3: [3, 3]}
    assert "drafter model failed" in caplog.text
    assert bench.draft(1, 2, num_tokens=1) == {1: [1], 2: [2]} and not bench.sink.failures


class YieldingDrafter(FaultyDrafter):
    """Its step is a generator."""

    def step(self):
        yield from super().step()


def test_a_drafter_may_yield_its_drafts_one_by_one(bench):
    bench.core = DraftCore({"model": YieldingDrafter()}, [], bench.sink, 8)
    bench.open(1, [1, 2, 3])
    bench.open(2, [4])
    assert bench.draft(1, 2, num_tokens=2) == {1: [3, 3], 2: [4, 4]}
    assert bench.draft(1, num_tokens=1) == {1: [3]} and not bench.sink.failures


def test_a_drafter_whose_has_work_fails_drafts_nothing_and_disturbs_no_other(bench, caplog):
    drafter = FaultyDrafter()
    bench.core = DraftCore({"model": drafter, "ngram": NgramDrafter()}, [], bench.sink, 8)
    bench.open(1, [1, 2, 3])
    bench.open(2, [4, 5, 4, 5], "ngram")
    drafter.fault = "has_work"
    assert not bench.core.has_work, "no request is pending"
    for _ in range(2):
        drafts = bench.draft(1, 2, num_tokens=2)
        assert drafts == {1: [], 2: [4, 5]} and not bench.core.has_work
    assert "drafter model failed" in caplog.text
    drafter.fault = ""
    assert bench.draft(1, num_tokens=2) == {1: [3, 3]} and not bench.sink.failures


@pytest.mark.parametrize("fault", ["open", "close"])
def test_a_drafter_that_cannot_open_or_close_loses_that_sequence_only(bench, caplog, fault):
    drafter = FaultyDrafter()
    bench.core = DraftCore({"model": drafter}, [], bench.sink, 8)
    bench.open(1, [1, 2, 3])
    drafter.fault = fault
    bench.open(2, [4])
    bench.core.apply(Close((1, 2)))
    assert "drafter model failed" in caplog.text
    assert list(bench.sink.failures) == ([(1, 2)] if fault == "open" else [])
    assert bench.draft(1, num_tokens=2) == {1: [3, 3]}


class LosingDrafter(FaultyDrafter):
    """Takes nothing in again that was in its step when that failed."""

    def step(self):
        self.fault = "open"
        raise RuntimeError("no step today")


def test_cores_are_kept_awake_while_a_sequence_is_open_however_it_ends(bench):
    bench.core = DraftCore({"model": LosingDrafter(), "ngram": NgramDrafter()}, [], bench.sink, 8, bench.fast_wake)
    bench.open(1, [1, 2, 3])
    for n in (2, 3, 4):
        bench.open(n, [4, n], "ngram", deadline_s=100.0 if n == 2 else None)
    assert bench.fast_wake.num_held == 4
    assert bench.draft(1, num_tokens=2) == {} and list(bench.sink.failures) == [(1, 1)]
    assert bench.fast_wake.num_held == bench.sink.load.num_running == 3
    bench.core.expire(100.0)
    bench.open(5, [4], "nobody")
    assert bench.fast_wake.num_held == 2
    bench.core.apply(Close((1, 3)))
    bench.core.apply(CloseLink(1))
    assert bench.fast_wake.num_held == 0
