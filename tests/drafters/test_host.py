"""The drafter host: requests by (base length, next id), commits meanwhile, reloads between steps."""

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import Request
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.model.drafter import ModelDrafter
from betoken.engine.sampling import SamplingParams

PROMPT = [1, 2, 3]


class Recorder:
    """A sink that keeps drafts by request key."""

    def __init__(self):
        self.drafts, self.lost_keys = {}, []

    def drafted(self, answers):
        self.drafts |= {answer.request.key: answer.drafted.draft_ids for answer in answers}

    def lost(self, hosted):
        self.lost_keys.append(hosted.key)


class Counting(ImmediateDrafter):
    """Drafts `step`, 2 * `step` ... after the last id, and counts open sequences."""

    def __init__(self, step=1):
        super().__init__()
        self.step_size, self.opened = step, []

    def open(self, sequence):
        self.opened.append(sequence)

    def close(self, sequence):
        super().close(sequence)
        self.opened.remove(sequence)

    def propose(self, sequence, num_tokens):
        return Drafted(sequence, [sequence.ids[-1] + self.step_size * place for place in range(1, num_tokens + 1)])


def hosting(drafters, **options):
    sink = Recorder()
    host = DrafterHost(drafters, sink, **options)
    sequence = DraftSequence((1, 1), SamplingParams(temperature=0.0, ignore_eos=True), PROMPT, [], 100)
    return host, sink, host.open(sequence, next(iter(drafters)))


def asked(num_tokens=2, ahead_ids=()):
    return Request(num_tokens, num_tokens, ahead_ids=ahead_ids)


def run(host):
    while host.has_work:
        host.step()
        host.check_integrity()


def test_requests_for_several_outcomes_are_open_at_once_and_answered_by_key(fake_runner_class):
    runner = fake_runner_class()
    host, sink, hosted = hosting({"model": ModelDrafter(runner, max_rows=16, max_prefill_tokens=6)})
    host.request(hosted, asked())
    for ahead_ids in ([7], [7, 8], [9]):
        host.request(hosted, asked(ahead_ids=ahead_ids))
    run(host)
    texts = {(3, 3): [], (4, 7): [7], (5, 8): [7, 8], (4, 9): [9]}
    assert sink.drafts == {key: runner.complete([*PROMPT, *ahead], 2) for key, ahead in texts.items()}
    host.commit(hosted, [7])
    host.request(hosted, asked())
    host.close(hosted)
    assert runner.page_table.num_free == runner.page_table.num_pages


def test_requests_for_outcomes_are_drafted_in_one_batch(fake_runner_class):
    runner = fake_runner_class()
    host, sink, hosted = hosting({"model": ModelDrafter(runner, max_rows=16, max_prefill_tokens=6)})
    for ahead_ids in ([7], [9]):
        host.request(hosted, asked(ahead_ids=ahead_ids))
    run(host)
    assert runner.forwards == [8, 2] and len(sink.drafts) == 2


def test_a_request_whose_key_is_open_is_rejected_by_length_and_id():
    host, _, hosted = hosting({"counting": Counting()})
    host.request(hosted, asked(ahead_ids=[7]))
    with pytest.raises(FailedPreconditionError, match="length 4 and next id 7 is still open"):
        host.request(hosted, asked(ahead_ids=[7]))


def test_a_commit_during_a_request_is_applied_after_its_draft_and_the_next_request_waits_for_it():
    host, sink, hosted = hosting({"counting": Counting()})
    host.request(hosted, asked())
    host.commit(hosted, [10, 20])
    host.request(hosted, asked())
    assert hosted.tip == (5, 20) and len(hosted.requests) == 2
    run(host)
    assert sink.drafts == {(3, 3): [4, 5], (5, 20): [21, 22]}
    assert hosted.sequence.ids == [*PROMPT, 10, 20] and not hosted.requests


def test_a_queued_request_that_a_commit_overtakes_gets_an_empty_draft():
    host, sink, hosted = hosting({"counting": Counting()})
    host.request(hosted, asked())
    host.commit(hosted, [10])
    host.request(hosted, asked())
    host.commit(hosted, [30])
    run(host)
    assert sink.drafts == {(3, 3): [4, 5], (4, 10): []}


def test_a_fault_ends_the_requests_for_all_outcomes_of_its_sequence():
    class Failing(Counting):
        def step(self):
            raise RuntimeError("no step today")

    drafter = Failing()
    host, sink, hosted = hosting({"failing": drafter}, max_faults=1)
    host.request(hosted, asked())
    host.request(hosted, asked(ahead_ids=[7]))
    host.step()
    assert sink.drafts == {(3, 3): [], (4, 7): []}
    assert sink.lost_keys == [(1, 1)] and not drafter.opened and not host.has_sequences


def test_a_reload_moves_sequences_and_open_requests_to_the_new_drafter():
    old, new = Counting(), Counting(100)
    host, sink, hosted = hosting({"counting": old})
    host.request(hosted, asked())
    host.request(hosted, asked(ahead_ids=[7]))
    host.commit(hosted, [50])
    host.reload({"counting": new})
    assert not old.opened and len(new.opened) == 2
    run(host)
    assert sink.drafts == {(3, 3): [103, 203], (4, 7): [107, 207]}
    assert hosted.sequence.ids == [*PROMPT, 50] and len(new.opened) == 1


def test_a_reload_of_a_source_reaches_the_sequences_of_fused():
    sources = {"a": Counting(), "b": Counting()}
    host, sink, hosted = hosting({"fused": FusedDrafter(sources), **sources})
    host.request(hosted, asked())
    host.reload({"a": Counting(100), "b": Counting(100)})
    run(host)
    assert sink.drafts == {(3, 3): [103, 203]} and not any(source.opened for source in sources.values())


def test_a_reload_into_a_drafter_that_cannot_open_loses_its_sequences_only():
    class Closed(Counting):
        def open(self, sequence):
            raise RuntimeError("closed")

    host, sink, hosted = hosting({"counting": Counting()})
    host.request(hosted, asked())
    host.reload({"counting": Closed()})
    assert sink.lost_keys == [(1, 1)] and sink.drafts == {(3, 3): []} and not host.has_sequences
