"""Number of programs among which a launch of attention splits the keys: its grid, without a device."""

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from betoken.kernels.attention.kernel import attention_triton
from betoken.kernels.rows import PagedRows, TreePaths


@pytest.mark.parametrize(
    ("num_rows", "max_length", "num_splits"),
    [
        (16, 1024, 4),
        (16, 200, 1),
        (256, 4096, 1),
        (16, 16384, 16),
        (16, 131072, 16),
        (64, 16384, 4),
        (64, 131072, 1),  # 545 MB of parts
        (256, 16384, 1),
    ],
)
def test_a_recorded_launch_divides_the_keys_though_most_blocks_may_be_empty(
    num_rows: int, max_length: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 and 8 heads, and room for a sequence a row, as a forward is recorded."""
    grids: list[tuple[str, tuple[int, ...]]] = []

    def record(kernel: JITFunction, *args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
        grids.append((kernel.__name__, grid))

    monkeypatch.setattr(JITFunction, "run", record)
    query, cache = torch.zeros(num_rows, 32, 128, device="meta"), torch.zeros(2, 16, 8, 128)
    integers = torch.zeros(num_rows + 2, dtype=torch.int32)
    paths = TreePaths(integers[1:], integers)
    rows = PagedRows(integers[2:], integers[2:], integers, integers, paths, max_length)
    attention_triton(query, cache, cache, rows, scale=1.0)
    assert [grid[2] for name, grid in grids if name == "_attend"] == [num_splits]
    assert ("_fold_chunks" in dict(grids)) == (num_splits > 1)
