"""A forward waits for drafts if one forward for all takes less time than one after another, idle time included."""

import time

import pytest

from betoken.engine.bring_up.step_costs import StepCost
from betoken.rpc.link.commands import Close
from betoken.verify_worker.commands import Grant
from betoken.verify_worker.gathering import Gathering
from betoken.verify_worker.scheduler import prefill_rows
from tests.verify_worker.harness import Bench

MS = 1_000_000


def learned(turn_ms, forward_ns=lambda rows: 7.0 * MS, num_blocks=50):
    """Blocks of five rows that come `turn_ms` after a verification result."""
    gathering = Gathering(forward_ns)
    for _ in range(num_blocks):
        gathering.add_block(turn_ms * MS, 5)
    return gathering


def test_a_forward_does_not_wait_before_the_first_block():
    assert Gathering(lambda rows: 7.0 * MS).wait_ns(0, 1, 5, 200, [0]) == 0.0


@pytest.mark.parametrize(("idle_ms", "left_ms"), [(0.0, 2.0), (0.5, 1.5), (1.9, 0.1)])
def test_a_forward_waits_for_a_late_block_if_rows_cost_nothing(idle_ms, left_ms):
    wait_ns = learned(2.0).wait_ns(round(idle_ms * MS), 1, 5, 200, [round(idle_ms * MS)])
    assert wait_ns == pytest.approx(left_ms * MS)


@pytest.mark.parametrize("turn_ms", [4.3, 10.0, 500.0])
def test_a_forward_does_not_wait_for_a_block_that_takes_too_long(turn_ms):
    assert learned(turn_ms).wait_ns(0, 1, 5, 200, [0]) == 0.0


def test_a_forward_does_not_wait_if_each_row_takes_its_time():
    gathering = learned(1.0, lambda rows: (0.7 + 0.12 * rows) * MS)
    assert gathering.wait_ns(0, 1, 5, 200, [0] * 15) == 0.0
    assert gathering.wait_ns(0, 8, 40, 200, [0] * 8) == 0.0


def test_many_blocks_do_not_wait_for_few_but_few_wait_for_many():
    gathering = learned(2.0)
    assert gathering.wait_ns(0, 15, 75, 200, [0]) == 0.0
    assert gathering.wait_ns(0, 1, 5, 200, [0] * 15) == pytest.approx(2.0 * MS)


def test_a_forward_waits_for_all_blocks_or_none():
    """One of two had its result with the last forward; the other just now, of another link, or was not heard since."""
    gathering = learned(3.0)
    assert gathering.wait_ns(MS, 1, 5, 200, [round(1.5 * MS)] * 2) == pytest.approx(1.5 * MS)
    assert gathering.wait_ns(MS, 1, 5, 200, [round(1.5 * MS), 0]) == pytest.approx(3.0 * MS)
    assert gathering.wait_ns(2 * MS, 1, 5, 200, [round(1.5 * MS), 0]) == 0.0
    assert gathering.wait_ns(2 * MS, 1, 5, 200, [round(1.5 * MS), 90 * MS]) == pytest.approx(1.5 * MS)


def test_a_forward_does_not_wait_for_blocks_that_need_another_forward():
    gathering = learned(2.0)
    assert gathering.wait_ns(0, 4, 20, 20, [0] * 4) == pytest.approx(2.0 * MS)
    assert gathering.wait_ns(0, 4, 20, 19, [0] * 4) == 0.0


def test_a_forward_waits_a_little_for_a_late_block():
    gathering = learned(2.0)
    assert 0.0 < gathering.wait_ns(round(2.1 * MS), 1, 5, 200, [round(2.1 * MS)]) < 0.2 * MS
    assert gathering.wait_ns(round(2.3 * MS), 1, 5, 200, [round(2.3 * MS)]) == 0.0


def test_one_slow_client_hardly_changes_the_wait_for_blocks_of_others():
    gathering = learned(2.0)
    gathering.add_block(60_000.0 * MS, 5)
    assert gathering.wait_ns(0, 1, 5, 200, [0]) == pytest.approx(2.0 * MS, rel=0.02)


def test_a_block_that_was_there_before_the_prompt_was_computed_took_no_time():
    gathering = Gathering(lambda rows: 7.0 * MS)
    for _ in range(50):
        gathering.add_block(-5.0 * MS, 5)
    assert gathering.wait_ns(0, 1, 5, 200, [0]) <= 0.1 * MS


class Waits:
    """Says how long to wait, and notes what it was asked."""

    def __init__(self):
        self.left_ns, self.asked, self.turns = 0.0, [], []

    def add_block(self, turn_ns, num_rows):
        self.turns.append((turn_ns, num_rows))

    def wait_ns(self, idle_ns, num_ready, num_rows, room, since_sent_ns):
        assert num_rows + room == 32
        self.asked.append((num_ready, num_rows, len(since_sent_ns)))
        return self.left_ns


@pytest.fixture
def bench(fake_runner_class):
    made = Bench(fake_runner_class(), step_costs=[StepCost(rows, 0, 7 * MS) for rows in (1, 32)])
    made.core._gathering = Waits()
    for sequence_id in (1, 2):
        made.open(sequence_id, [1, 2, 3])
        made.block(sequence_id, 3, [5])
    made.run()
    return made


def lengths(bench):
    return {key[1]: seq.committed_length for key, seq in bench.core._sequences.items()}


def test_a_core_starts_when_the_last_block_has_come(bench):
    gathering, before = bench.core._gathering, lengths(bench)
    gathering.left_ns = 1e9
    num_decisions = len(bench.sink.decisions)
    bench.block(1, before[1], [7, 8])
    bench.core.step()
    assert gathering.asked[-1] == (1, 3, 1)
    assert len(bench.sink.decisions) == num_decisions and not bench.core.has_work
    assert 0.0 < bench.core.expire(time.monotonic()) - time.monotonic() <= 1.0
    bench.block(2, before[2], [7])
    assert bench.core.has_work
    bench.core.step()
    assert {decision.key[1] for decision in bench.sink.decisions[num_decisions:]} == {1, 2}
    assert [num_rows for _, num_rows in gathering.turns[-2:]] == [3, 2] and gathering.turns[-1][0] > 0


def test_a_core_starts_when_it_has_waited_long_enough(bench):
    gathering, before = bench.core._gathering, lengths(bench)
    gathering.left_ns = 1e6
    bench.block(1, before[1], [7])
    bench.core.step()
    assert not bench.core.has_work
    bench.core.expire(time.monotonic() + 1.0)
    assert bench.core.has_work
    gathering.left_ns = 0.0
    bench.core.step()
    assert bench.sink.decisions[-1].key == (1, 1)


def test_a_forward_does_not_wait_for_a_closed_sequence(bench):
    bench.core._gathering.left_ns = 1e9
    bench.block(1, lengths(bench)[1], [7])
    bench.core.step()
    bench.core.apply(Close((1, 2)))
    num_asked = len(bench.core._gathering.asked)
    bench.run()
    assert bench.sink.decisions[-1].key == (1, 1) and len(bench.core._gathering.asked) == num_asked


def test_prompts_and_decode_steps_wait_for_blocks_too(bench):
    gathering = bench.core._gathering
    bench.block(1, lengths(bench)[1], [], num_plain_steps=4)
    for sequence_id in (3, 4):
        bench.open(sequence_id, list(range(1, 31)))
    bench.core.step()
    assert gathering.asked[-1] == (2, 1 + 8, 1)  # eight prompt tokens at a time, whosever


def test_the_arrival_of_a_grant_is_when_it_was_received(bench):
    """Not when a forward under way then was over: turns would seem as long as forwards."""
    sequence = bench.core._sequences[1, 1]
    bench.apply(Grant((1, 1), sequence.committed_length, 1, sequence.idle_since_ns + 5))
    assert bench.core._gathering.turns[-1] == (5, 1)


def test_a_forward_does_not_wait_for_a_complete_answer(bench):
    bench.core._sequences[1, 2].is_finished = True
    bench.block(1, lengths(bench)[1], [7])
    num_asked = len(bench.core._gathering.asked)
    bench.run()
    assert bench.sink.decisions[-1].key == (1, 1) and len(bench.core._gathering.asked) == num_asked


def test_prompts_take_as_many_rows_as_hardly_lengthen_a_forward():
    on_gpu = [StepCost(rows, 512, ns * MS) for rows, ns in ((1, 7), (32, 7), (64, 8), (128, 10), (256, 14))]
    on_cpu = [StepCost(rows, 512, ns * MS) for rows, ns in ((1, 1), (8, 2), (32, 5))]
    assert prefill_rows(on_gpu, 64, 256) == 128
    assert prefill_rows(on_gpu, 64, 100) == 64
    assert prefill_rows(on_cpu, 64, 128) == prefill_rows([], 64, 128) == 64
