"""The order of measuring: fair to every side, and of all kinds from the start."""

from collections import Counter

from betoken.bench.drafters_runner import category_of, interleave, seed_of, shuffled
from betoken.bench.drafters_store import Task
from betoken.bench.prompts import Prompt

SIDES = ["none", "model", "ngram", "fused"]


def test_every_side_is_in_every_place_and_after_every_other_about_as_often() -> None:
    orders = [shuffled(SIDES, Task("file", index, 0)) for index in range(600)]
    assert all(sorted(order) == sorted(SIDES) for order in orders)
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    pairs = Counter(pair for order in orders for pair in zip(order, order[1:], strict=False))
    assert len(places) == 16 and min(places.values()) > 100 and max(places.values()) < 200
    assert len(pairs) == 12 and min(pairs.values()) > 100 and max(pairs.values()) < 200


def test_an_order_is_the_same_when_asked_again_and_another_in_the_next_pass() -> None:
    task = Task("file", 3, 0)
    assert shuffled(SIDES, task) == shuffled(SIDES, task)
    assert any(shuffled(SIDES, Task("file", i, 0)) != shuffled(SIDES, Task("file", i, 1)) for i in range(5))


def test_groups_take_turns_until_each_ends() -> None:
    prompts = [Prompt(index, str(index)) for index in range(4)]
    groups = {("a", "qa"): prompts[:1], ("a", "rag"): prompts[1:3], ("b", "code"): prompts}
    order = [(name, prompt.index) for name, prompt in interleave(groups)]
    assert order == [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1), ("b", 2), ("b", 3)]


def test_mt_benchs_categories_are_one_as_in_spec_bench() -> None:
    categories = [category_of(Prompt(0, "", category), "code") for category in ("", "qa", "coding", "writing", "math")]
    assert categories == ["code", "qa", "mt_bench", "mt_bench", "mt_bench"]


def test_samples_of_a_prompt_have_their_own_seeds_and_repeats_have_the_same() -> None:
    seeds = [seed_of(Task("p", 7, repeat), num_samples=3) for repeat in range(6)]
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3 and seeds[0] == 7
    assert [seed_of(Task("p", 7, repeat), num_samples=1) for repeat in range(3)] == [7] * 3
