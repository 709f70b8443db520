"""Drafters attached to the verify worker change how many rounds there are, never a token; their faults cost drafts."""

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.engine.sampler.verification import VerificationMode as Mode
from betoken.rpc.link.commands import Close
from betoken.verify_worker.attached import AttachedDrafters
from tests.verify_worker.harness import Bench
from tests.verify_worker.oracle_drafter import PROMPT, VOCAB_SIZE, OracleDrafter, bench_with


def answer(bench, n, num_output):
    return bench.emitted(n, {})[:num_output]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 8])
@pytest.mark.parametrize("branches", ["1", "4"])
def test_ngram_rounds_give_the_plain_tokens_for_any_length_with_few_pages_too(
    fake_runner_class, num_draft_tokens, branches
):
    runner = fake_runner_class()
    bench = bench_with(runner, NgramDrafter())
    prompts = {n: [n, n + 1, n + 2] * 7 for n in range(1, 9)}
    for n, prompt in prompts.items():
        bench.open(n, prompt, drafter="it", drafter_settings={"max_branches": branches})
        bench.grant(n, len(prompt), 60, num_draft_tokens)
    bench.run()
    for n, prompt in prompts.items():
        assert answer(bench, n, 60) == runner.complete(prompt, 60)


def test_a_grant_of_rounds_accepts_whole_drafts_without_a_further_message(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench = bench_with(runner, OracleDrafter(truth))
    bench.open(1, PROMPT, drafter="it")
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    bench.run()
    assert answer(bench, 1, 20) == truth[:20]
    assert [decision.num_accepted for decision in bench.sink.decisions] == [4] * 4
    for decision in bench.sink.decisions:
        own = decision.attached
        assert (list(own.sources), own.depth, own.is_exhausted, own.is_failed) == (["it"], 4, True, False)


def test_rounds_end_with_the_longest_sequence(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench = bench_with(runner, OracleDrafter(truth))
    bench.open(1, PROMPT, drafter="it", max_length=10)
    bench.grant(1, len(PROMPT), 100, num_draft_tokens=4)
    bench.run()
    assert bench.emitted(1, {}) == truth[:7]


def test_a_grant_without_drafts_ends_attached_rounds(fake_runner_class):
    runner = fake_runner_class()
    bench = bench_with(runner, OracleDrafter(runner.complete(PROMPT, 60)))
    bench.open(1, PROMPT, drafter="it")
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    bench.core.step()
    bench.grant(1, len(PROMPT), 20)
    bench.run()
    assert bench.sink.decisions[0].num_accepted == 4
    assert {decision.num_draft_tokens for decision in bench.sink.decisions[1:]} == {0}


@pytest.mark.parametrize("mode", list(Mode))
def test_a_late_draft_is_waited_for_only_where_tokens_depend_on_drafts(fake_runner_class, mode):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench = bench_with(runner, OracleDrafter(truth, num_late=5))
    bench.open(1, PROMPT, drafter="it", mode=mode)
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    bench.run()
    assert answer(bench, 1, 20) == truth[:20]
    assert (bench.sink.decisions[0].num_draft_tokens == 0) == (mode is Mode.COUPLED)


def test_a_drafter_that_fails_costs_drafts_and_in_the_end_its_place(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    drafter = OracleDrafter(truth, fault=RuntimeError("drafter"))
    bench = bench_with(runner, drafter)
    bench.open(1, PROMPT, drafter="it")
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    bench.run()
    assert bench.emitted(1, {}) == truth[:20]
    failed = [decision.attached is not None and decision.attached.is_failed for decision in bench.sink.decisions]
    assert failed == [True] * 3 + [False] * 17
    assert not bench.sink.failures


@pytest.mark.parametrize("draft_ids", [[VOCAB_SIZE], [-1], ["x"], list(range(20))])
def test_an_invalid_attached_draft_costs_only_itself(fake_runner_class, draft_ids):
    runner = fake_runner_class()
    bench = bench_with(runner, OracleDrafter(draft_ids * 60))
    bench.open(1, PROMPT, drafter="it")
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    bench.run()
    assert bench.emitted(1, {})[:20] == runner.complete(PROMPT, 20)


def test_drafter_names_and_settings_are_rejected_for_new_and_resumed_sequences(fake_runner_class):
    """The latter's router opens it without its drafter, or with another."""
    runner = fake_runner_class()
    bench = bench_with(runner, NgramDrafter())
    for n, output_ids in ((1, ()), (2, runner.complete(PROMPT, 2))):
        bench.open(n, PROMPT, drafter="it", drafter_settings={"max_ngram": "x"}, output_ids=output_ids)
        bench.open(n + 2, PROMPT, drafter="other", output_ids=output_ids)
    assert [type(error) for error in bench.sink.failures.values()] == [InvalidArgumentError] * 4
    bench.open(5, PROMPT, output_ids=runner.complete(PROMPT, 2))
    bench.grant(5, 5, 10)
    bench.run()
    assert bench.emitted(5, {}) == runner.complete(PROMPT, 12)[2:]


def test_attached_rounds_need_a_drafter(fake_runner_class):
    bench = bench_with(fake_runner_class(), NgramDrafter())
    bench.open(1, PROMPT)
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4)
    assert "block.num_draft_tokens" in str(bench.sink.failures[1, 1])


def test_a_closed_sequence_is_closed_in_its_drafter(fake_runner_class):
    drafter = OracleDrafter([])
    bench = bench_with(fake_runner_class(), drafter)
    bench.open(1, PROMPT, drafter="it")
    bench.core.apply(Close((1, 1)))
    assert (drafter.num_opened, drafter.num_closed) == (1, 1)


def bench_with_two(runner, truth):
    drafters = {"good": OracleDrafter(truth), "late": OracleDrafter(truth, num_late=1000), "ngram": NgramDrafter()}
    return Bench(runner, attached=AttachedDrafters(drafters, VOCAB_SIZE, max_draft_tokens=8)), drafters


def test_a_grant_names_another_attached_drafter_in_the_middle_of_a_round(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench, drafters = bench_with_two(runner, truth)
    bench.open(1, PROMPT)
    for step, name in enumerate(("ngram", "good", "late", "good", "ngram", "", "good") * 2):
        length = len(PROMPT) + len(bench.emitted(1, {}))
        bench.grant(1, length, 50 - length, num_draft_tokens=4 if step % 5 else 2, drafter=name)
        bench.step()
    bench.run()
    assert answer(bench, 1, 40) == truth[:40]
    assert drafters["good"].num_opened == 6
    bench.close(1)
    assert drafters["good"].num_closed == 6


def test_a_grant_of_a_drafter_that_is_not_attached_is_rejected(fake_runner_class):
    bench, _ = bench_with_two(fake_runner_class(), [1] * 60)
    for n, drafter in ((1, "other"), (2, "")):
        bench.open(n, PROMPT)
        bench.grant(n, len(PROMPT), 20, num_draft_tokens=4, drafter=drafter)
    assert [error.field for error in bench.sink.failures.values()] == ["block.drafter", "block.num_draft_tokens"]


def test_a_sequence_goes_on_without_a_drafter_that_rejects_it_later(fake_runner_class):
    runner = fake_runner_class()
    truth = runner.complete(PROMPT, 60)
    bench, drafters = bench_with_two(runner, truth)

    def reject(sequence):
        raise InvalidArgumentError("open.prompt_ids", "3 ids", "must be fewer")

    drafters["good"].open = reject
    bench.open(1, PROMPT)
    bench.grant(1, len(PROMPT), 20, num_draft_tokens=4, drafter="good")
    bench.run()
    assert bench.emitted(1, {}) == truth[:20] and not bench.sink.failures
