"""A model's tree holds the best nodes there are, found in at most as many forwards as it has nodes."""

import math
import random

import pytest

from betoken.drafters.model.tree import ModelTree


def say(path, rng_seed, num_ids=6):
    """A pretend model: log-shares of `num_ids` ids after a path, likeliest first."""
    rng = random.Random(f"{rng_seed} {path}")
    weights = [rng.random() ** 4 + 1e-6 for _ in range(num_ids)]
    ids = sorted(range(num_ids), key=lambda token_id: -weights[token_id])
    return ids, [math.log(weights[token_id] / sum(weights)) for token_id in ids]


def grow(tree, seed, rng=None):
    """The number of forwards; `rng` lets only some of the wanted nodes into each, best first, as few rows do."""
    num_forwards = 0
    nodes = [-1]
    while nodes:
        num_forwards += 1
        if nodes != [-1]:
            num_rows = tree.num_rows
            ids, parents = tree.add_rows(nodes)
            assert ids == [tree.path_ids(node)[-1] for node in nodes]
            assert len(parents) == tree.num_rows == num_rows + len(nodes)
            assert all(-1 <= parent < row for row, parent in enumerate(parents))
        for node in nodes:
            tree.add_children(node, *say(tuple(tree.path_ids(node)), seed))
        wanted = tree.to_expand()
        nodes = wanted[: rng.randrange(1, 4)] if rng and wanted else wanted
        assert tree.is_growing == bool(nodes)
    return num_forwards


def best_nodes(seed, num_nodes, max_branches, max_depth, end_ids=()):
    """Every node of the whole tree by brute force: the paths of the best."""
    scored = []
    level = [((), 0.0)]
    for _ in range(max_depth):
        following = []
        for path, score in level:
            if not path or path[-1] not in end_ids:
                ids, shares = say(path, seed)
                following += [((*path, i), score + share) for i, share in zip(ids[:max_branches], shares, strict=False)]
        scored += following
        level = following
    return {path for path, _ in sorted(scored, key=lambda entry: -entry[1])[:num_nodes]}


def paths_of(draft_ids, parents):
    paths = []
    for token_id, parent in zip(draft_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_of_a_tree_are_found_whatever_the_forwards_hold(seed):
    rng = random.Random(seed)
    num_nodes, max_branches = rng.randrange(2, 6), rng.randrange(2, 5)
    expected = best_nodes(seed, num_nodes, max_branches, num_nodes)
    for rows in (None, rng):
        tree = ModelTree(num_nodes, max_branches, num_nodes, ())
        assert grow(tree, seed, rows) <= num_nodes
        draft_ids, parents = tree.best()
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        paths = paths_of(draft_ids, parents)
        assert set(paths) == expected and len(paths) == num_nodes


def test_the_depth_of_a_tree_is_bounded_and_no_node_follows_an_end_id():
    for seed in range(20):
        tree = ModelTree(12, 3, 3, end_ids=(2, 4))
        assert grow(tree, seed) <= 12
        assert set(paths_of(*tree.best())) == best_nodes(seed, 12, 3, 3, end_ids=(2, 4))


def test_impossible_ids_are_not_nodes_of_a_tree():
    tree = ModelTree(4, 3, 4, ())
    tree.add_children(-1, [7, 0, 0], [0.0, -math.inf, -math.inf])
    assert tree.best() == ([7], [-1])


def test_a_confident_model_drafts_a_chain_one_node_a_forward_and_its_kv_is_a_chain():
    tree = ModelTree(4, 2, 4, ())
    for node, token_id in ((-1, 5), (0, 6), (2, 7), (4, 8)):
        if node >= 0:
            assert tree.to_expand() == [node]
            tree.add_rows([node])
        tree.add_children(node, [token_id, 1], [-0.01, -9.0])
    assert not tree.is_growing
    assert tree.best() == ([5, 6, 7, 8], [-1, 0, 1, 2])
    assert tree.leading_ids() == [5, 6, 7]


def test_kv_of_side_branches_is_not_reused():
    tree = ModelTree(4, 2, 4, ())
    tree.add_children(-1, [5, 6], [-0.7, -0.7])
    assert tree.add_rows(tree.to_expand()) == ([5, 6], [-1, -1])
    assert tree.leading_ids() == [5]


def test_a_stopped_tree_keeps_its_nodes():
    tree = ModelTree(4, 2, 4, ())
    assert tree.is_growing
    tree.stop()
    assert not tree.is_growing and tree.best() == ([], [])
