"""Paged attention: the reference by definition, the CPU kernel by the reference, both row by row."""

import dataclasses

import pytest
import torch

from betoken.kernels.attention import attention, attention_native, attention_reference
from betoken.kernels.cpu import load_cpu_kernels
from betoken.kernels.kv_write import kv_write
from betoken.kernels.rows import PagedRows, TreePaths
from tests.kernels.paged import CASES, by_definition, make_case, take_options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_reference_and_cpu_attention_equal_the_definition(name: str, dtype: torch.dtype) -> None:
    case = dict(CASES[name])
    options = take_options(case, dtype)
    query, key_cache, value_cache, rows, sequences = make_case(dtype=dtype, **case)
    options["scale"] = query.shape[-1] ** -0.5
    expected = by_definition(query, sequences, rows, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 1.5e-2
    reference = attention_reference(query, key_cache, value_cache, rows, **options)
    torch.testing.assert_close(reference.double(), expected, rtol=tolerance, atol=tolerance)
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    native = attention_native(query, key_cache, value_cache, rows, **options)
    torch.testing.assert_close(native.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("implementation", "has_sinks"), [(attention_reference, False), (attention_native, False), (attention_native, True)]
)
def test_an_attention_row_does_not_depend_on_its_neighbours(
    implementation: object, has_sinks: bool, dtype: torch.dtype
) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    query, key_cache, value_cache, rows, _ = make_case([(300, 11), (40, 40), (5, 1)], num_heads=6, dtype=dtype)
    options = {"scale": 0.125, "sinks": torch.linspace(-4, 8, 6) if has_sinks else None}
    together = implementation(query, key_cache, value_cache, rows, **options)  # type: ignore[operator]
    for row in range(len(query)):
        alone = PagedRows(
            rows.positions[row : row + 1], rows.row_segments[row : row + 1], rows.page_starts, rows.page_ids
        )
        result = implementation(query[row : row + 1], key_cache, value_cache, alone, **options)  # type: ignore[operator]
        assert torch.equal(result[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 19}, {"softcap": 3.0}], ids=["plain", "window", "soft cap"])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 5, 8])
def test_attention_of_few_queries_a_key_head_has_the_bits_of_many(
    num_heads: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    case = make_case([(300, 23), (40, 40), (259, 5)], num_heads=num_heads, num_key_heads=1, dtype=dtype)
    query, key_cache, value_cache, rows, _ = case
    key_cache[rows.page_ids[2], 3] = torch.inf  # scores of both infinities and NaN
    together = attention_native(query, key_cache, value_cache, rows, scale=0.125, **options)
    for row in range(len(query)):
        alone = PagedRows(
            rows.positions[row : row + 1], rows.row_segments[row : row + 1], rows.page_starts, rows.page_ids
        )
        result = attention_native(query[row : row + 1], key_cache, value_cache, alone, scale=0.125, **options)
        assert torch.equal(result[0].nan_to_num(7.0), together[row].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("implementation", [attention_reference, attention_native])
def test_a_non_finite_value_reaches_only_attention_rows_that_see_it(
    implementation: object, bad: float, dtype: torch.dtype
) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    query, key_cache, value_cache, rows, sequences = make_case([(40, 9)], dtype=dtype)
    expected = implementation(query, key_cache, value_cache, rows, scale=0.125)  # type: ignore[operator]
    key, value = (part[31:].clone() for part in sequences[0])
    value[5, 0, 3] = bad
    kv_write(key, value, key_cache, value_cache, rows)
    got = implementation(query, key_cache, value_cache, rows, scale=0.125)  # type: ignore[operator]
    assert torch.equal(got[:5], expected[:5]) and torch.equal(got[:, 2:], expected[:, 2:])
    assert got[5:, :2].isnan().all(), "query heads 0 and 1 share key head 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", [attention_reference, attention_native])
def test_a_sink_counts_as_a_float_and_far_below_the_scores_as_nothing(
    implementation: object, dtype: torch.dtype
) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    query, key_cache, value_cache, rows, _ = make_case([(300, 5)], dtype=dtype)

    def attend(sinks: torch.Tensor | None) -> torch.Tensor:
        return implementation(query, key_cache, value_cache, rows, scale=0.125, sinks=sinks)  # type: ignore[operator]

    plain, half = attend(None), torch.tensor([2.0, -1.5, 200.0, 0.0]).bfloat16()
    assert torch.equal(attend(half), attend(half.float())) and torch.equal(attend(half), attend(half.double()))
    assert not attend(half)[:, 2].any(), "so large a sink leaves no weight for keys"
    for low in (-1e3, -3e38, -torch.inf):
        assert torch.equal(attend(torch.full((4,), low)), plain)


def test_attention_shapes_that_do_not_fit_are_rejected() -> None:
    query, key_cache, value_cache, rows, _ = make_case([(5, 2)])
    with pytest.raises(ValueError, match="does not fit"):
        attention(query[:, :3], key_cache, value_cache, rows, scale=1.0)
    with pytest.raises(ValueError, match="dtypes"):
        attention(query.bfloat16(), key_cache, value_cache, rows, scale=1.0)
    with pytest.raises(ValueError, match="positions"):
        attention(query[:1], key_cache, value_cache, rows, scale=1.0)
    with pytest.raises(ValueError, match="caches"):
        attention(query, key_cache[0], value_cache[0], rows, scale=1.0)
    for sinks in (torch.zeros(2), torch.zeros(4, 1), torch.zeros(4).long()):
        with pytest.raises(ValueError, match="sinks"):
            attention(query, key_cache, value_cache, rows, scale=1.0, sinks=sinks)


def test_caches_of_other_pages_are_refused() -> None:
    _, key_cache, value_cache, rows, _ = make_case([(5, 2)])
    new = torch.zeros(2, *key_cache.shape[2:])
    with pytest.raises(ValueError, match="same pages"):
        kv_write(new, new, key_cache, value_cache[:, :8].contiguous(), rows)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"positions": torch.tensor([3, 4])}, "positions"),
        ({"positions": torch.tensor([3, 0, 4, 0], dtype=torch.int32)[::2]}, "positions"),
        ({"row_segments": torch.zeros(1, dtype=torch.int32)}, "row_segments"),
        ({"page_ids": torch.zeros(1, 1, dtype=torch.int32)}, "page_ids"),
        ({"paths": TreePaths(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))}, "paths.starts"),
        ({"paths": TreePaths(torch.zeros(3, dtype=torch.int32), torch.zeros(0))}, "paths.slots"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_attention_rows_are_rejected(changes: dict[str, object], name: str) -> None:
    """The kernels read them by address: what does not fit would be other memory."""
    _, _, _, rows, _ = make_case([(5, 2)])
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(rows, **changes)
