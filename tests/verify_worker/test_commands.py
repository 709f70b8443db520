"""Commands are values: a log of a run, applied to a fresh core, gives the same verification results."""

import dataclasses
import pickle
import random

import pytest

from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.engine.sampler.verification import VerificationMode as Mode
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.link.commands import CloseLink, TellLoad
from betoken.verify_worker.attached import AttachedDrafters
from tests.verify_worker.harness import STEP, Bench

VOCAB_SIZE = 97
NUM_PROMPTS = 12


def bench_of(runner_class):
    attached = AttachedDrafters({"ngram": NgramDrafter()}, VOCAB_SIZE, max_draft_tokens=8)
    return Bench(runner_class(num_pages=52), max_rows=24, attached=attached)


def results(bench):
    """Decisions of each sequence in order, without times."""
    told = {}
    for decision in bench.sink.decisions:
        own = decision.attached
        if own is not None:
            own = dataclasses.replace(own, forward_ns=0)
        told.setdefault(decision.key, []).append(
            dataclasses.replace(decision, queue_ns=0, forward_ns=0, num_cached_tokens=0, attached=own)
        )
    return told


def some_run(bench, seed):
    """Blocks, trees, grants, rounds, closes and refused commands of many sequences, with too few pages for all."""
    rng = random.Random(seed)
    for n in range(1, NUM_PROMPTS + 1):
        prompt = [rng.randrange(8) for _ in range(rng.randrange(1, 30))]
        mode = rng.choice([Mode.COUPLED, Mode.COUPLED, Mode.REJECTION, Mode.TYPICAL])
        drafter = rng.choice(["", "ngram"])
        bench.open(n, prompt, mode=mode, drafter=drafter, temperature=rng.choice([0.0, 0.8]), seed=n)
        match rng.randrange(4):
            case 0:
                bench.grant(n, len(prompt), 30, num_draft_tokens=4 if drafter else 0)
            case 1:
                bench.block(n, len(prompt), bench.runner.complete(prompt, 3), num_plain_steps=10)
            case 2 if mode is Mode.COUPLED:
                bench.block(n, len(prompt), [5, 6, 7], parents=(-1, -1, 0))
            case 3 if mode is Mode.REJECTION:
                bench.block(n, len(prompt), [5], draft_probs=(SparseProbs([5, 6], [0.5, 0.5]),))
        for _ in range(rng.randrange(3)):
            bench.step()
        if rng.random() < 0.2:
            bench.close(rng.randrange(1, n + 1))
    bench.block(3, 1, [1])  # stale, or of a sequence that is closed
    bench.apply(TellLoad())
    bench.run()
    bench.open(1, [1, 2])  # twice, perhaps
    bench.apply(CloseLink(1))


@pytest.mark.parametrize("seed", range(6))
def test_a_log_of_commands_replays_to_the_same_results(fake_runner_class, seed):
    first, again = bench_of(fake_runner_class), bench_of(fake_runner_class)
    some_run(first, seed)
    for command in pickle.loads(pickle.dumps(first.log)):
        if command == STEP:
            again.core.step()
        else:
            again.core.apply(command)
    assert len(results(first)) > NUM_PROMPTS // 3
    assert results(again) == results(first)
    assert again.sink.failures.keys() == first.sink.failures.keys()
    assert again.sink.stales == first.sink.stales
    again.core.check_integrity()


def test_applying_a_command_does_not_change_the_command(fake_runner_class):
    bench = bench_of(fake_runner_class)
    some_run(bench, seed=0)
    before = pickle.dumps(bench.log)
    again = bench_of(fake_runner_class)
    for command in bench.log:
        if command != STEP:
            again.core.apply(command)
    assert pickle.dumps(bench.log) == before
