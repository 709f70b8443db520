"""Paged attention: the reference by definition, the CPU kernel by the reference, both row by row."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foretoken.kernels.attention import attention, attention_native, attention_reference
from foretoken.kernels.cpu import load_cpu_kernels
from foretoken.kernels.kv_write import kv_write
from foretoken.kernels.rows import PagedRows

PAGE_SIZE = 16


def make_case(
    lengths: list[tuple[int, int]],
    num_heads: int = 4,
    num_key_heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    dtype: torch.dtype = torch.float32,
    page_size: int = PAGE_SIZE,
) -> tuple[Tensor, Tensor, Tensor, PagedRows, list[tuple[Tensor, Tensor]]]:
    """Sequences of (length, new rows) in shuffled pages; slots that nobody wrote hold 100, so a stray read shows."""
    generator = torch.Generator().manual_seed(7)
    page_counts = [-(-length // page_size) for length, _ in lengths]
    order = torch.randperm(sum(page_counts) + 3, generator=generator).int()
    key_cache = torch.full((len(order), page_size, num_key_heads, key_size), 100.0, dtype=dtype)
    value_cache = torch.full((len(order), page_size, num_key_heads, value_size), 100.0, dtype=dtype)
    starts = torch.tensor([0, *page_counts]).cumsum(0).int()
    sequences, positions, segments = [], [], []
    for index, (length, num_new) in enumerate(lengths):
        key = torch.randn(length, num_key_heads, key_size, generator=generator).to(dtype)
        value = torch.randn(length, num_key_heads, value_size, generator=generator).to(dtype)
        everything = PagedRows(
            torch.arange(length).int(), torch.full((length,), index).int(), starts, order[: sum(page_counts)]
        )
        kv_write(key, value, key_cache, value_cache, everything)
        sequences.append((key, value))
        positions += range(length - num_new, length)
        segments += [index] * num_new
    query = torch.randn(len(positions), num_heads, key_size, generator=generator).to(dtype)
    rows = PagedRows(torch.tensor(positions).int(), torch.tensor(segments).int(), starts, order[: sum(page_counts)])
    return query, key_cache, value_cache, rows, sequences


def by_definition(
    query: Tensor, sequences: list[tuple[Tensor, Tensor]], rows: PagedRows, scale: float, window: int, softcap: float
) -> Tensor:
    """Softmax attention in float64, row by row."""
    out = []
    for row, (position, segment) in enumerate(zip(rows.positions.tolist(), rows.row_segments.tolist(), strict=True)):
        first = max(0, position - window + 1) if window else 0
        key, value = (part[first : position + 1].double() for part in sequences[segment])
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("hd,thd->ht", query[row].double(), key.repeat_interleave(group, 1)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(torch.einsum("ht,thd->hd", functional.softmax(scores, -1), value.repeat_interleave(group, 1)))
    return torch.stack(out)


CASES = {
    "one token": {"lengths": [(1, 1)]},
    "decode beside prefill": {"lengths": [(300, 1), (17, 17), (600, 5), (16, 16)]},
    "chunk borders": {"lengths": [(255, 2), (256, 2), (257, 2), (513, 3)]},
    "window": {"lengths": [(300, 40), (20, 3)], "window": 19},
    "window over a chunk": {"lengths": [(900, 3)], "window": 300},
    "soft cap": {"lengths": [(40, 9)], "softcap": 3.0},
    "many heads a key": {"lengths": [(50, 3)], "num_heads": 24, "num_key_heads": 1},
    "odd sizes": {"lengths": [(33, 5)], "key_size": 24, "value_size": 40},
    "large heads": {"lengths": [(70, 6)], "key_size": 256, "value_size": 256},
    "wide by half": {"lengths": [(70, 6)], "key_size": 96, "value_size": 96},
    "odd pages": {"lengths": [(70, 6), (9, 2)], "page_size": 5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_reference_and_cpu_kernel_are_the_definition(name: str, dtype: torch.dtype) -> None:
    case = dict(CASES[name])
    window, softcap = case.pop("window", 0), case.pop("softcap", 0.0)
    query, key_cache, value_cache, rows, sequences = make_case(dtype=dtype, **case)
    options = {"scale": query.shape[-1] ** -0.5, "window": window, "softcap": softcap}
    expected = by_definition(query, sequences, rows, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 1.5e-2
    reference = attention_reference(query, key_cache, value_cache, rows, **options)
    torch.testing.assert_close(reference.double(), expected, rtol=tolerance, atol=tolerance)
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    native = attention_native(query, key_cache, value_cache, rows, **options)
    torch.testing.assert_close(native.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", [attention_reference, attention_native])
def test_a_row_does_not_see_its_neighbours(implementation: object, dtype: torch.dtype) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    query, key_cache, value_cache, rows, _ = make_case([(300, 11), (40, 40), (5, 1)], num_heads=6, dtype=dtype)
    together = implementation(query, key_cache, value_cache, rows, scale=0.125)  # type: ignore[operator]
    for row in range(len(query)):
        alone = PagedRows(
            rows.positions[row : row + 1], rows.row_segments[row : row + 1], rows.page_starts, rows.page_ids
        )
        result = implementation(query[row : row + 1], key_cache, value_cache, alone, scale=0.125)  # type: ignore[operator]
        assert torch.equal(result[0], together[row])


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key_cache, value_cache, rows, _ = make_case([(5, 2)])
    with pytest.raises(ValueError, match="does not fit"):
        attention(query[:, :3], key_cache, value_cache, rows, scale=1.0)
    with pytest.raises(ValueError, match="dtypes"):
        attention(query.bfloat16(), key_cache, value_cache, rows, scale=1.0)
    with pytest.raises(ValueError, match="positions"):
        attention(query[:1], key_cache, value_cache, rows, scale=1.0)
