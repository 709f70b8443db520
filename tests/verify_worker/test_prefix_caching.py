"""KV that other sequences left is taken up, and never changes a token."""

import random

import pytest

from betoken.rpc.link.commands import Close, TellLoad
from tests.verify_worker.harness import Bench

PROMPT = list(range(20))


class CountingDict(dict):
    num_lookups = 0

    def get(self, key, default=None):
        self.num_lookups += 1
        return super().get(key, default)


def answer(bench, sequence_id, prompt_ids, num_tokens):
    """Emitted ids, and the rows that the model computed for them."""
    num_before = len(bench.runner.forwards)
    bench.open(sequence_id, prompt_ids)
    bench.block(sequence_id, len(prompt_ids), [], num_tokens)
    bench.run()
    return bench.emitted(sequence_id, {}), sum(bench.runner.forwards[num_before:])


def test_a_prompt_seen_before_is_not_computed_again(bench):
    first = answer(bench, 1, PROMPT, 3)
    second = answer(bench, 2, PROMPT, 3)
    assert first == (bench.runner.complete(PROMPT, 3), 22)
    assert second == (first[0], 22 - 16)  # four pages of four ids; the last id is always computed
    assert bench.sink.load.num_cached_tokens == 16
    assert [decision.num_cached_tokens for decision in bench.sink.decisions] == [0, 0, 0, 16, 0, 0]


def test_a_cached_answer_is_reused_by_the_next_prompt(bench):
    output_ids, _ = answer(bench, 1, PROMPT, 9)
    bench.core.apply(Close((1, 1)))
    question = [*PROMPT, *output_ids, 5, 6]
    assert answer(bench, 2, question, 4) == (bench.runner.complete(question, 4), 34 - 28)


def test_another_prefix_shares_no_pages(bench):
    answer(bench, 1, PROMPT, 3)
    other = [9, *PROMPT[1:]]
    assert answer(bench, 2, other, 3) == (bench.runner.complete(other, 3), 22)
    assert bench.sink.load.num_cached_tokens == 0


def test_rejected_drafts_are_never_found_in_the_prefix_cache(bench):
    truth = bench.runner.complete(PROMPT, 1)
    wrong = [(token + 1) % 90 for token in [*truth, 1, 2, 3, 4, 5, 6, 7]]
    bench.open(1, PROMPT)
    bench.block(1, 20, wrong)
    bench.run()
    prompt = [*PROMPT, *wrong]
    assert answer(bench, 2, prompt, 3) == (bench.runner.complete(prompt, 3), 30 - 20)


def test_equal_prompts_that_wait_for_their_turn_are_computed_once(bench):
    bench.open(1, [90])
    bench.block(1, 1, [], 40)  # decodes meanwhile, so that prompts take turns
    bench.core.step()
    for sequence_id in (2, 3, 4):
        bench.open(sequence_id, PROMPT)
        bench.block(sequence_id, 20, [], 1)
    bench.core.step()
    held = {key[1]: len(seq.page_ids) for key, seq in bench.core._sequences.items()}
    assert held == {1: 1, 2: 5, 3: 0, 4: 0}  # none before its turn
    bench.run()
    cached = {decision.key[1]: decision.num_cached_tokens for decision in bench.sink.decisions}
    assert cached == {1: 0, 2: 0, 3: 16, 4: 16}
    assert sum(bench.runner.forwards) == 40 + 20 + 4 + 4


def test_a_prompt_that_waits_for_pages_is_not_looked_up_in_every_plan(fake_runner_class):
    bench = Bench(fake_runner_class(num_pages=40, page_size=4, max_context=160))
    beginning = list(range(80))
    for sequence_id in range(1, 9):
        prompt = [*beginning, *[sequence_id] * 20]
        bench.open(sequence_id, prompt, max_length=120)
        bench.block(sequence_id, 100, [], 20)
    for _ in range(4 + 4):
        bench.core.step()
    waiting = [seq for seq in bench.core._sequences.values() if not seq.page_ids]
    assert len(waiting) == 5
    searched = bench.runner.page_table._published = CountingDict(bench.runner.page_table._published)
    bench.scheduler.plan(bench.core._sequences.values())
    assert searched.num_lookups == len(waiting)
    bench.run()
    for sequence_id in range(1, 9):
        assert bench.emitted(sequence_id, {}) == bench.runner.complete([*beginning, *[sequence_id] * 20], 20)


def test_all_pages_are_free_although_they_hold_cached_ids(bench):
    answer(bench, 1, PROMPT, 3)
    bench.core.apply(Close((1, 1)))
    bench.core.apply(TellLoad())
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages
    bench.check_integrity()


def test_shared_pages_count_once_when_room_is_made(fake_runner_class):
    """Two idle sequences share three of their pages: only giving up both frees them."""
    bench = Bench(fake_runner_class(num_pages=8, page_size=4, max_context=32))
    shared = list(range(12))
    for sequence_id in (1, 2):
        prompt = [*shared, 50 + sequence_id, 7]
        bench.open(sequence_id, prompt, max_length=20)
        bench.block(sequence_id, 14, [], 1)
        bench.run()
    assert bench.runner.page_table.num_free == 8 - 5
    long_prompt = list(range(60, 88))
    bench.open(3, long_prompt, max_length=32)
    bench.block(3, 28, [], 2)
    bench.run()
    assert bench.emitted(3, {}) == bench.runner.complete(long_prompt, 2)
    assert bench.scheduler.num_preemptions == 2
    for sequence_id in (1, 2):
        bench.block(sequence_id, 15, [], 2)
    bench.run()
    for sequence_id in (1, 2):
        assert bench.emitted(sequence_id, {}) == bench.runner.complete([*shared, 50 + sequence_id, 7], 3)


@pytest.mark.parametrize("seed", range(12))
def test_texts_with_shared_prefixes_are_right_in_any_order_and_without_free_pages(fake_runner_class, seed):
    rng = random.Random(seed)
    num_pages = rng.randrange(12, 40)
    bench = Bench(fake_runner_class(num_pages=num_pages, page_size=rng.choice((1, 4)), max_context=40))
    max_length = min(40, num_pages * bench.runner.page_table.page_size)
    beginnings = [[rng.randrange(90) for _ in range(rng.randrange(1, max_length - 8))] for _ in range(3)]
    asked = {}
    for sequence_id in range(1, 41):
        beginning = rng.choice(beginnings)
        prompt = beginning[: rng.randrange(1, len(beginning) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(3))]
        bench.open(sequence_id, prompt, max_length=max_length)
        truth = bench.runner.complete(prompt, 5)
        draft = [token if rng.random() < 0.8 else rng.randrange(90) for token in truth[: rng.randrange(4)]]
        bench.block(sequence_id, len(prompt), draft, num_plain_steps=5 - len(draft))
        asked[sequence_id] = (prompt, truth, {len(prompt): draft})
        for _ in range(rng.randrange(4)):
            if bench.core.has_work:
                bench.core.step()
                bench.check_integrity()
        if len(asked) > 6:
            ended = rng.choice(list(asked))
            bench.run()
            prompt, truth, drafts = asked.pop(ended)
            emitted = bench.emitted(ended, drafts)
            assert emitted and emitted == truth[: len(emitted)]
            bench.core.apply(Close((1, ended)))
    assert not bench.sink.failures
    assert bench.scheduler.num_cached_tokens > 0
