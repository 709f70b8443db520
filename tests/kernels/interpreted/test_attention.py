"""The Triton attention is near the definition; rows and launches change no bit; trees have the bits of chains."""

import random
from itertools import product

import pytest
import torch

from betoken.kernels.attention import attention
from betoken.kernels.rows import PagedRows, TreePaths
from tests.kernels.paged import CASES, by_definition, make_case, take_options
from tests.kernels.trees import TREE_CASES, make_tree_case, random_parents
from tests.products import covering

DTYPES = [torch.float32, torch.bfloat16]
HALF_CASES = ["one token", "window over a chunk", "soft cap", "odd sizes", "odd pages", "sinks, window", "slopes"]
HALF_TYPES = [torch.bfloat16, torch.float16]
# Of a value of size 1 to 4; the interpreter truncates bfloat16, the others round.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def to(rows: PagedRows, device: torch.device, max_length: int | None = None) -> PagedRows:
    columns = [part.to(device) for part in (rows.positions, rows.row_segments, rows.page_starts, rows.page_ids)]
    paths = None if rows.paths is None else TreePaths(rows.paths.starts.to(device), rows.paths.slots.to(device))
    return PagedRows(*columns, paths, max_length)


def on_device(options: dict, device: torch.device) -> dict:
    return {name: given.to(device) if isinstance(given, torch.Tensor) else given for name, given in options.items()}


def alone(rows: PagedRows, row: int) -> PagedRows:
    part = slice(row, row + 1)
    return PagedRows(rows.positions[part], rows.row_segments[part], rows.page_starts, rows.page_ids)


@pytest.mark.parametrize(
    ("name", "dtype"), [*product(CASES, [torch.float32]), *covering(HALF_CASES, HALF_TYPES, strength=1)]
)
def test_triton_attention_equals_the_definition(
    name: str, dtype: torch.dtype, device: torch.device, takes_triton
) -> None:
    case = dict(CASES[name])
    options = take_options(case, dtype)
    query, key_cache, value_cache, rows, sequences = make_case(dtype=dtype, **case)
    options["scale"] = query.shape[-1] ** -0.5
    expected = by_definition(query, sequences, rows, **options)
    options = on_device(options, device)
    tensors = [tensor.to(device) for tensor in (query, key_cache, value_cache)]
    longer = int(rows.positions.max()) + 600
    with takes_triton():
        whole = attention(*tensors, to(rows, device), **options)
        divided = attention(*tensors, to(rows, device, longer), **options)
    torch.testing.assert_close(whole.cpu().double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(divided, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_triton_attention_row_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, device: torch.device, takes_triton
) -> None:
    query, key_cache, value_cache, rows, _ = make_case([(300, 11), (20, 20), (5, 1)], num_heads=6, dtype=dtype)
    tensors = [tensor.to(device) for tensor in (query, key_cache, value_cache)]
    rows = to(rows, device)
    with takes_triton():
        together = attention(*tensors, rows, scale=0.125)
        for row in (0, 7, 10, 11, 19, 30, 31):
            result = attention(tensors[0][row : row + 1], *tensors[1:], alone(rows, row), scale=0.125)
            assert torch.equal(result[0], together[row])


@pytest.mark.parametrize(("name", "dtype"), [*product(TREE_CASES, [torch.float32]), ("window", torch.bfloat16)])
def test_triton_attention_of_a_tree_node_has_the_bits_of_its_path_as_a_chain(
    name: str, dtype: torch.dtype, device: torch.device, takes_triton
) -> None:
    case = dict(TREE_CASES[name])
    options = take_options(case, dtype) | {"scale": 0.125}
    options = on_device(options, device)
    tree = make_tree_case(**case, dtype=dtype)
    tensors = [tensor.to(device) for tensor in (tree.query, tree.key_cache, tree.value_cache)]
    nodes = random.Random(0).sample(range(len(tree.query)), min(len(tree.query), 3))
    with takes_triton():
        together = attention(*tensors, to(tree.rows, device), **options)
        if name == "after a chunk":
            divided = attention(*tensors, to(tree.rows, device, int(tree.rows.positions.max()) + 1), **options)
            assert torch.equal(divided, together)
        for node in nodes:
            key_cache, value_cache, row = tree.chain_of(node)
            caches = (key_cache.to(device), value_cache.to(device))
            assert torch.equal(
                attention(tensors[0][node : node + 1], *caches, to(row, device), **options)[0], together[node]
            )


@pytest.mark.parametrize("name", ["decode beside prefill", "sinks, window"])
def test_a_long_bound_and_room_for_more_sequences_change_no_attention_bit(
    name: str, device: torch.device, takes_triton
) -> None:
    """As in a recorded forward, of which a batch may use little: many chunks, divided as if no block were empty."""
    case = dict(CASES[name])
    options = take_options(case, torch.float32) | {"scale": 0.125}
    options = on_device(options, device)
    query, key_cache, value_cache, rows, _ = make_case(**case)
    tensors = [tensor.to(device) for tensor in (query, key_cache, value_cache)]
    roomy = to(rows, device, (4 if device.type == "cpu" else 16) * 256)
    roomy.page_starts = torch.cat([roomy.page_starts, roomy.page_starts[-1:].repeat(len(query))])
    with takes_triton():
        assert torch.equal(attention(*tensors, roomy, **options), attention(*tensors, to(rows, device), **options))


@pytest.mark.slow
def test_triton_attention_takes_five_hundred_tree_nodes_and_more(device: torch.device, takes_triton) -> None:
    tree = make_tree_case(random_parents(random.Random(1), 520, 40), 5, num_key_heads=1, key_size=16, value_size=16)
    tensors = [tensor.to(device) for tensor in (tree.query, tree.key_cache, tree.value_cache)]
    with takes_triton():
        out = attention(*tensors, to(tree.rows, device), scale=0.2)
        for node in (0, 311, 519):
            key_cache, value_cache, row = tree.chain_of(node)
            caches = (key_cache.to(device), value_cache.to(device))
            assert torch.equal(
                attention(tensors[0][node : node + 1], *caches, to(row, device), scale=0.2)[0], out[node]
            )


def test_triton_attention_takes_an_empty_batch(device: torch.device, takes_triton) -> None:
    query, key_cache, value_cache, rows, _ = make_case([(5, 1)])
    tensors = [tensor.to(device) for tensor in (query[:0], key_cache, value_cache)]
    nothing = PagedRows(rows.positions[:0], rows.row_segments[:0], rows.page_starts, rows.page_ids)
    with takes_triton():
        assert attention(*tensors, to(nothing, device), scale=1.0).shape == (0, 4, 64)
