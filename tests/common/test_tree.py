"""Draft trees as lists of parents: valid trees, chains, depths of nodes and paths."""

import random
from collections.abc import Iterator

from betoken.common.tree import is_chain, is_path, leading_chain, longest_path, node_depths, num_sound, unless_chain


def random_trees(num: int = 500) -> Iterator[list[int]]:
    for seed in range(num):
        rng = random.Random(seed)
        yield [rng.randrange(-1, node) for node in range(rng.randrange(9))]


def test_a_draft_tree_is_valid_up_to_its_first_misplaced_parent() -> None:
    for parents in random_trees():
        assert num_sound(parents) == len(parents)
        for node in range(len(parents)):
            for wrong in (-2, node, node + 1):
                assert num_sound([*parents[:node], wrong, *parents[node + 1 :]]) == node


def test_a_chain_is_a_draft_tree_whose_depths_count_its_nodes() -> None:
    for parents in random_trees():
        assert is_chain(parents) == (node_depths(parents) == list(range(len(parents))))
        assert unless_chain(parents) == (None if is_chain(parents) else parents)
        assert is_chain(parents[: leading_chain(parents)])
        assert leading_chain(parents) == len(parents) or not is_chain(parents[: leading_chain(parents) + 1])


def test_paths_of_a_draft_tree_go_from_the_root_to_a_node() -> None:
    for parents in random_trees():
        longest = 0
        for node in range(len(parents)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            assert is_path(path, parents) and len(path) == node_depths(parents)[node] + 1
            assert not is_path([*path, node], parents)
            assert len(path) == 1 or not is_path(path[1:], parents)
            longest = max(longest, len(path))
        assert longest_path(parents) == longest
        assert is_path([], parents) and not is_path([len(parents)], parents) and not is_path([-1], parents)
