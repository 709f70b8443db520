import itertools

import pytest
import torch

from betoken.training.block_efficiency import Rounds, accepted_of, best_first, ranks_of


def test_rounds_are_those_of_drafting_and_verifying_step_by_step() -> None:
    accepted = [9, 9, 2, 0, 1, 0, 3, 0, 0, 0]
    rounds = Rounds()
    rounds.add(accepted, prompt_length=2, length=10)
    # last committed: 2 (accepts 2, one more) -> 5 (none) -> 6 (3 of the 3 left, the last of them by the target) -> 9
    assert (rounds.num_rounds, rounds.num_tokens) == (3, 7)
    rounds.add([0] * 10, prompt_length=2, length=10)
    assert (rounds.num_rounds, rounds.num_tokens) == (3 + 7, 14)
    assert rounds.block_efficiency == 1.4
    assert rounds.by_position == [0.2, 0.2] and sum(rounds.by_position) == pytest.approx(rounds.block_efficiency - 1)


def test_the_lowest_of_equal_ids_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 4)
    assert ranks_of(logits, torch.arange(4)).tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("num_nodes", [1, 4, 11])
def test_a_tree_holds_the_likeliest_paths_each_after_its_parent(num_nodes: int) -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.4, 0.3, 0.05], [0.35, 0.1, 0.02]]
    paths = best_first(accuracies, num_nodes)
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def likelihood(path: tuple[int, ...]) -> float:
        return float(torch.tensor([accuracies[head][rank] for head, rank in enumerate(path)]).double().prod())

    assert sorted(map(likelihood, paths)) == pytest.approx(sorted(sorted(map(likelihood, every))[-num_nodes:]))
    assert all(len(path) == 1 or path[:-1] in paths[:index] for index, path in enumerate(paths))
    assert len(best_first(accuracies, 1000)) == len(every)


def test_a_row_of_ranks_goes_as_deep_as_the_tree_has_its_path() -> None:
    paths = [(0,), (1,), (0, 0), (0, 0, 2)]
    rows = [[0, 0, 2], [0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 2]]
    assert [accepted_of(row, paths) for row in rows] == [3, 2, 1, 0, 1]
