"""The dynamic tree equals EAGLE-2's definition for any scores."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from betoken.drafters.eagle3.tree import ROOT, DynamicTree

NUM_IDS = 7


def scores_after(path, seed):
    """Log-probabilities of the ids after a path."""
    rng = random.Random(f"{seed} {path}")
    weights = [rng.random() ** 4 + 1e-9 for _ in range(NUM_IDS)]
    return [math.log(weight / sum(weights)) for weight in weights]


def literal(num_nodes, top_k, depth, seed):
    """Paths and scores as the paper's algorithm reads: every level asks the `top_k` best of the level before."""
    nodes, level = {}, [((), 0.0)]
    for _ in range(depth):
        children = {}
        for path, score in level:
            log_probs = scores_after(path, seed)
            for token_id in sorted(range(NUM_IDS), key=lambda i: -log_probs[i])[:top_k]:
                children[(*path, token_id)] = score + log_probs[token_id]
        nodes |= children
        level = sorted(children.items(), key=lambda child: -child[1])[:top_k]
    return dict(sorted(nodes.items(), key=lambda node: -node[1])[:num_nodes])


def grow(tree, seed):
    num_rows = 0
    while tree.level:
        num_rows += len([node for node in tree.level if node != ROOT])
        children = []
        for node in tree.level:
            log_probs = scores_after(tuple(tree.path_ids(node)), seed)
            ids = sorted(range(NUM_IDS), key=log_probs.__getitem__, reverse=True)
            children.append((ids, [log_probs[token_id] for token_id in ids]))
        tree.add(children)
    return num_rows


def paths_of(tree):
    draft_ids, parents, scores = tree.best()
    paths = []
    for token_id, parent in zip(draft_ids, parents, strict=True):
        paths.append(((*paths[parent], token_id)) if parent >= 0 else (token_id,))
    return dict(zip(paths, scores, strict=True))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_the_draft_tree_holds_the_likeliest_nodes_of_the_papers_algorithm(num_nodes, top_k, depth, seed):
    tree = DynamicTree(num_nodes, top_k, depth)
    grow(tree, seed)
    expected = literal(num_nodes, top_k, depth, seed)
    assert paths_of(tree).keys() == expected.keys()
    assert list(paths_of(tree).values()) == pytest.approx(list(expected.values()))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_no_more_nodes_are_expanded_than_can_have_children_in_the_draft(num_nodes, top_k, depth, seed):
    tree = DynamicTree(num_nodes, top_k, depth)
    assert grow(tree, seed) <= (depth - 1) * min(top_k, num_nodes - 1)


def test_a_draft_tree_with_one_branch_is_a_chain():
    tree = DynamicTree(4, 1, 9)
    grow(tree, 3)
    assert tree.best()[1] == [-1, 0, 1, 2]
    assert tree.row_parents == [-1, 0, 1] and tree.is_chain


def test_rows_of_a_tree_level_name_the_rows_of_their_parents():
    tree = DynamicTree(num_nodes=9, max_branches=2, max_depth=3)
    tree.add([((5, 6), (math.log(0.6), math.log(0.3)))])
    assert (tree.level_ids, tree.level_parents, tree.row_parents) == ([5, 6], [0, 0], [-1, -1])
    tree.add([((1, 2), (math.log(0.1), math.log(0.1))), ((3, 4), (math.log(0.9), math.log(0.05)))])
    assert (tree.level_ids, tree.level_parents, tree.row_parents) == ([3, 1], [1, 0], [-1, -1, 1, 0])
    assert not tree.is_chain
    assert tree.path_ids(tree.level[0]) == [6, 3]
    assert tree.level_shares == pytest.approx([0.27, 0.06])


def test_no_tree_node_follows_an_end_id():
    tree = DynamicTree(9, 2, 3, end_ids={5})
    tree.add([((5, 6), (math.log(0.6), math.log(0.3)))])
    assert tree.level_ids == [6]


def test_unlikely_tree_nodes_are_left_out_except_the_first():
    tree = DynamicTree(9, 2, 3, min_score=math.log(0.5))
    tree.add([((5, 6), (math.log(0.4), math.log(0.3)))])
    assert tree.best()[0] == [5]
    tree = DynamicTree(9, 2, 3, min_score=math.log(0.5))
    tree.add([((5, 6), (math.log(0.6), math.log(0.3)))])
    tree.add([((1, 2), (math.log(0.9), math.log(0.05)))])
    assert tree.best()[:2] == ([5, 1], [-1, 0])


def test_a_filtered_token_is_not_a_child_in_the_tree():
    tree = DynamicTree(9, 2, 1)
    tree.add([((5, 0), (0.0, -math.inf))])
    assert tree.best()[0] == [5]
