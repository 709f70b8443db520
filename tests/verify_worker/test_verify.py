"""Verification of drafts in the core: accepted tokens, the token after them, end ids, modes and invalid logits."""

from unittest.mock import Mock

import pytest
import torch

from betoken.common.errors import (
    InternalError,
    InvalidArgumentError,
)
from betoken.common.names import NUM_ACCEPTED, NUM_DRAFT_TOKENS
from betoken.engine.sampler.verification import VerificationMode as Mode
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.link.commands import Close
from tests.verify_worker.harness import EOS, Bench


def test_a_right_draft_is_accepted_whole_and_gives_a_bonus_token(bench):
    prompt = [1, 2, 3]
    truth = bench.runner.complete(prompt, 5)
    bench.open(1, prompt)
    bench.block(1, 3, truth[:4])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id, decision.num_draft_tokens) == (4, truth[4], 4)


def test_a_wrong_draft_gives_the_recovered_token(bench):
    prompt = [5]
    truth = bench.runner.complete(prompt, 3)
    wrong = (truth[1] + 1) % 90
    bench.open(1, prompt)
    bench.block(1, 1, [truth[0], wrong, truth[2]])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id) == (1, truth[1])


@pytest.mark.parametrize("ends", [{"ignore_eos": False}, {"stop_token_ids": (EOS,)}])
@pytest.mark.parametrize(("min_new_tokens", "num_more"), [(0, 0), (1, 0), (2, 4), (5, 4)])
def test_an_end_id_of_resumed_output_counts_from_min_new_tokens_on(bench, ends, min_new_tokens, num_more):
    bench.open(1, [1, 2], [7, EOS, 8], min_new_tokens=min_new_tokens, **ends)
    bench.block(1, 5, [], 4)
    bench.run()
    assert bench.emitted(1, {}) == bench.runner.complete([1, 2, 7, EOS, 8], num_more)


@pytest.mark.parametrize(("has_end", "num_kept"), [(False, 5), (True, 3)])
def test_draft_tokens_accepted_beyond_an_end_id_are_not_counted(bench, has_end, num_kept):
    prompt = [3, 4, 5]
    bench.open(1, prompt)
    bench.block(1, 3, [], num_plain_steps=5)
    bench.run()
    own, span = bench.emitted(1, {}), Mock()
    assert len(set(own)) == len(own) == 5
    bench.open(2, prompt, span=span, stop_token_ids=(own[2],) if has_end else ())
    bench.block(2, 3, own[:4])
    bench.run()
    decision = bench.sink.decisions[-1]
    assert (decision.num_accepted, decision.num_kept) == (4, num_kept)
    bench.core.apply(Close((1, 2)))
    span.set_attributes.assert_called_once_with({NUM_DRAFT_TOKENS: 4, NUM_ACCEPTED: min(4, num_kept)})


class SickRunner:
    """The fake model, but the logits after id 13 hold NaN."""

    def __init__(self, runner):
        self.runner = runner

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def forward(self, segments):
        output = self.runner.forward(segments)
        logits = output.logits
        last_ids = [id_ for segment in segments for id_ in segment.ids[len(segment.ids) - segment.num_logits :]]
        logits[[id_ == 13 for id_ in last_ids]] = torch.nan
        return output


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION, Mode.TYPICAL])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_nan_fail_their_sequence_alone(fake_runner_class, mode, temperature):
    runner = fake_runner_class()
    bench = Bench(SickRunner(runner))
    params = {"temperature": temperature, "top_k": 1, "mode": mode, "num_logprobs": 0}
    bench.open(1, [5, 13], **params)
    bench.open(2, [5, 6], **params)
    truth = runner.complete([5, 6], 3)
    bench.block(1, 2, [4, 4])
    bench.block(2, 2, [*truth[:1], 13, 7])
    bench.run()
    assert isinstance(bench.sink.failures.pop((1, 1)), InternalError) and not bench.sink.failures
    (decision,) = bench.sink.decisions
    assert (decision.key, decision.num_accepted, decision.next_id) == ((1, 2), 1, truth[1])
    bench.core.apply(Close((1, 2)))
    assert runner.page_table.num_free == runner.page_table.num_pages


@pytest.mark.parametrize("parents", [[], [-1, 0, 0]])
def test_draft_tokens_accepted_before_logits_of_nan_are_kept(fake_runner_class, parents):
    runner = fake_runner_class()
    runner.next_id = lambda context: {5: 6, 6: 13}.get(context[-1], 0)
    bench = Bench(SickRunner(runner))
    bench.open(1, [5])
    bench.block(1, 1, [6, 13, 0], parents=parents)
    bench.core.step()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id) == (1, 13) and not bench.sink.failures
    bench.block(1, 3, [], 4)
    bench.run()
    assert isinstance(bench.sink.failures[(1, 1)], InternalError) and len(bench.sink.decisions) == 1


CERTAIN_OF = [SparseProbs([7, 8], [0.25, 0.75]), SparseProbs([9], [1.0])]


def judged(bench, modes):
    """(num_accepted, next_id) by sequence of the same sampled block in each of the modes."""
    for n, mode in modes.items():
        bench.open(n, [1, 2, 3], mode=mode, temperature=1.0, seed=11)
        bench.block(n, 3, [8, 9], draft_probs=CERTAIN_OF if mode is Mode.REJECTION else [])
    bench.run()
    return {d.key[1]: (d.num_accepted, d.next_id) for d in bench.sink.decisions}


def test_each_sequence_of_a_forward_has_its_own_mode(fake_runner_class):
    modes = {1: Mode.COUPLED, 2: Mode.REJECTION, 3: Mode.TYPICAL, 4: Mode.REJECTION}
    together = Bench(fake_runner_class())
    results = judged(together, modes)
    assert len(together.runner.forwards) == 1
    for n, mode in modes.items():
        assert judged(Bench(fake_runner_class()), {n: mode}) == {n: results[n]}
    assert results[2] == results[4]


def test_typical_accepts_likely_tokens_and_rejection_those_no_likelier_in_the_draft(fake_runner_class):
    """After [1, 2, 3] the model gives its own token about 0.99."""
    bench = Bench(fake_runner_class())
    truth = bench.runner.complete([1, 2, 3], 3)
    for n, mode in enumerate((Mode.REJECTION, Mode.TYPICAL), start=1):
        bench.open(n, [1, 2, 3], mode=mode, temperature=1.0, seed=3)
        certain = [SparseProbs([token_id], [0.9]) for token_id in truth[:2]]
        bench.block(n, 3, truth[:2], draft_probs=certain if mode is Mode.REJECTION else [])
    bench.run()
    assert [decision.num_accepted for decision in bench.sink.decisions] == [2, 2]


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.TYPICAL])
def test_greedy_gives_the_target_s_tokens_in_every_mode(bench, mode):
    truth = bench.runner.complete([1, 2, 3], 3)
    bench.open(1, [1, 2, 3], mode=mode)
    bench.block(1, 3, [truth[0], (truth[1] + 1) % 90])
    bench.run()
    (decision,) = bench.sink.decisions
    assert (decision.num_accepted, decision.next_id) == (1, truth[1])


@pytest.mark.parametrize(
    ("mode", "fields", "field"),
    [
        (Mode.REJECTION, {"parents": [-1, 0]}, "block.parents"),
        (Mode.TYPICAL, {"draft_probs": CERTAIN_OF}, "block.draft_probs"),
        (Mode.COUPLED, {"draft_probs": CERTAIN_OF}, "block.draft_probs"),
    ],
)
def test_draft_fields_that_a_mode_does_not_support_are_rejected(bench, mode, fields, field):
    bench.open(1, [1, 2, 3], mode=mode, temperature=1.0)
    bench.block(1, 3, [8, 9], **fields)
    error = bench.sink.failures[(1, 1)]
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.limit) == (field, f"must be absent in the mode {mode.name}")
