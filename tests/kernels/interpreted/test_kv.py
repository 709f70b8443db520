"""The Triton KV write and compaction change the same slots to the same bits as their references, and no other."""

import random

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.kv_compact import kv_compact
from betoken.kernels.kv_write import kv_write
from betoken.kernels.rows import PagedRows, TreePaths
from tests.kernels.kv_moves import path_moves, random_caches


def paged_rows(device: torch.device, with_tree: bool) -> PagedRows:
    """Two sequences of 5 and 3 rows from slots 6 and 0 on, in pages of 4; the second ends with two siblings."""
    positions = [6, 7, 8, 9, 10, 0, 1, 1 if with_tree else 2]
    columns = [positions, [0] * 5 + [1] * 3, [0, 3, 4], [5, 0, 2, 7]]
    rows = PagedRows(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
    if with_tree:
        starts = torch.tensor([0] * 8 + [1], dtype=torch.int32, device=device)
        rows.paths = TreePaths(starts, torch.tensor([2], dtype=torch.int32, device=device))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_tree", [False, True])
@pytest.mark.parametrize(("num_heads", "key_size", "value_size"), [(1, 1, 3), (2, 64, 64), (3, 24, 40)])
def test_triton_kv_write_equals_the_reference(
    num_heads: int,
    key_size: int,
    value_size: int,
    with_tree: bool,
    dtype: torch.dtype,
    device: torch.device,
    takes_triton,
) -> None:
    generator = torch.Generator().manual_seed(1)
    # As the attention of transformers gives them: heads first, rows strided.
    new = [torch.randn(num_heads, 8, size, generator=generator).to(dtype) for size in (key_size, value_size)]
    new[1][0, 3, 0], new[1][-1, 5, -1] = torch.nan, -torch.inf
    results = []
    for path, where in (("reference", torch.device("cpu")), ("triton", device)):
        caches = [
            torch.full((9, 4, num_heads, size), 100.0, dtype=dtype, device=where) for size in (key_size, value_size)
        ]
        rows = paged_rows(where, with_tree)
        key, value = (tensor.to(where).transpose(0, 1) for tensor in new)
        if path == "triton":
            with takes_triton():
                kv_write(key, value, *caches, rows)
        else:
            with dispatch.override("reference"):
                kv_write(key, value, *caches, rows)
        results.append([cache.cpu() for cache in caches])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)
    assert results[0][1].isfinite().all() and int(results[0][0].isnan().all(-1).sum()) == 2
    assert int((results[0][0] != 100.0).any(-1).any(-1).sum()) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kv_compact_equals_the_reference(dtype: torch.dtype, device: torch.device, takes_triton) -> None:
    rng = random.Random(4)
    for num_groups in (0, 1, 5):
        moves = path_moves(rng, num_groups)
        expected = random_caches(num_groups, dtype)
        with dispatch.override("reference"):
            kv_compact(*expected, *moves)
        caches = [cache.to(device) for cache in random_caches(num_groups, dtype)]
        with takes_triton():
            kv_compact(*caches, *(column.to(device) for column in moves))
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(caches, expected, strict=True))
