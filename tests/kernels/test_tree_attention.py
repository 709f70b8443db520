"""Attention of tree nodes: every node has the bits of its path decoded as a chain, by every implementation."""

import random

import pytest
import torch

from betoken.kernels.attention import attention, attention_native, attention_reference
from betoken.kernels.cpu import load_cpu_kernels
from betoken.kernels.kv_write import kv_write
from betoken.kernels.rows import PagedRows, TreePaths
from tests.kernels.paged import take_options
from tests.kernels.trees import TREE_CASES, make_tree_case, random_parents

IMPLEMENTATIONS = {"reference": attention_reference, "native": attention_native}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TREE_CASES)
def test_attention_of_a_tree_node_has_the_bits_of_its_path_as_a_chain(name: str, path: str, dtype: torch.dtype) -> None:
    if path == "native" and load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    case = dict(TREE_CASES[name])
    options = take_options(case, dtype) | {"scale": 0.125}
    tree = make_tree_case(**case, dtype=dtype)
    together = IMPLEMENTATIONS[path](tree.query, tree.key_cache, tree.value_cache, tree.rows, **options)
    for node in range(len(tree.query)):
        key_cache, value_cache, row = tree.chain_of(node)
        alone = IMPLEMENTATIONS[path](tree.query[node : node + 1], key_cache, value_cache, row, **options)
        assert torch.equal(together[node], alone[0]), node


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_takes_five_hundred_tree_nodes_and_more(dtype: torch.dtype) -> None:
    tree = make_tree_case(random_parents(random.Random(1), 600, 40), 50, key_size=32, value_size=32, dtype=dtype)
    out = attention(tree.query, tree.key_cache, tree.value_cache, tree.rows, scale=0.2)
    for node in (0, 37, 311, 512, 599):
        key_cache, value_cache, row = tree.chain_of(node)
        alone = attention(tree.query[node : node + 1], key_cache, value_cache, row, scale=0.2)
        assert torch.equal(out[node], alone[0])


def test_a_list_of_slots_may_begin_where_the_path_leaves_its_order() -> None:
    parents = [-1, 0, 1, 0, 3, -1, 5]
    tree = make_tree_case(parents, 20)
    whole = attention(tree.query, tree.key_cache, tree.value_cache, tree.rows, scale=0.1)
    short = [[], [], [], [3], [3, 4], [5], [5, 6]]
    starts = torch.tensor([0] + [len(path) for path in short]).cumsum(0).int()
    tree.rows.paths = TreePaths(starts, torch.tensor([20 + node for path in short for node in path]).int())
    assert torch.equal(attention(tree.query, tree.key_cache, tree.value_cache, tree.rows, scale=0.1), whole)


def test_chains_may_share_the_batch_with_a_tree() -> None:
    tree = make_tree_case([-1, -1, 0], 20)
    chain = PagedRows(
        torch.tensor([18, 19]).int(), torch.tensor([0, 0]).int(), tree.rows.page_starts, tree.rows.page_ids
    )
    query = torch.cat([tree.query[:2], tree.query])
    paths = TreePaths(torch.tensor([0, 0, 0, 1, 2, 4]).int(), torch.tensor([20, 21, 20, 22]).int())
    mixed = PagedRows(
        torch.cat([chain.positions, tree.rows.positions]),
        torch.zeros(5).int(),
        tree.rows.page_starts,
        tree.rows.page_ids,
        paths,
    )
    caches = (tree.key_cache, tree.value_cache)
    out = attention(query, *caches, mixed, scale=0.1)
    assert torch.equal(out[:2], attention(tree.query[:2], *caches, chain, scale=0.1))
    assert torch.equal(out[2:], attention(tree.query, *caches, tree.rows, scale=0.1))


def test_a_tree_node_is_written_to_its_own_slot() -> None:
    tree = make_tree_case([-1, -1, 0], 5, page_size=4)
    key = torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 64).contiguous()
    kv_write(key, key, tree.key_cache, tree.value_cache, tree.rows)
    for node in range(3):
        page = tree.rows.page_ids[(5 + node) // 4]
        assert (tree.key_cache[page, (5 + node) % 4] == node).all()
        assert (tree.value_cache[page, (5 + node) % 4] == node).all()
