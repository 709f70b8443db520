"""The short convolution: what it sums by definition, and the bits of a row in any company and on any path of a tree."""

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.cpu import load_cpu_kernels
from betoken.kernels.rows import PagedRows
from betoken.kernels.short_conv import short_conv, short_conv_native, short_conv_reference
from tests.kernels.paged import make_case
from tests.kernels.trees import TREE_CASES, make_tree_case

IMPLEMENTATIONS = {"reference": short_conv_reference, "native": short_conv_native}
LENGTHS = [(300, 1), (17, 17), (2, 1), (1, 1), (40, 9)]


@pytest.fixture(params=IMPLEMENTATIONS)
def convolve(request: pytest.FixtureRequest):
    if request.param == "native" and load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    return IMPLEMENTATIONS[request.param]


def parameters(num_taps: int, num_channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(num_taps, num_channels, generator=generator).to(dtype)
    return weight, torch.randn(num_channels, generator=generator).to(dtype)


def make_inputs(num_channels: int, dtype: torch.dtype, page_size: int = 16):
    """Inputs [pages, page_size, C], rows, and each sequence's own inputs [n, C]."""
    sizes = {"num_heads": 1, "num_key_heads": 1, "key_size": num_channels, "value_size": 0}
    _, inputs, _, rows, sequences = make_case(LENGTHS, **sizes, dtype=dtype, page_size=page_size)
    return inputs.squeeze(2), rows, [key.squeeze(1) for key, _ in sequences]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_taps", "num_channels", "page_size"), [(3, 64, 16), (1, 40, 16), (4, 33, 5), (3, 1, 2), (9, 128, 4)]
)
def test_a_short_conv_row_equals_the_definition(convolve, num_taps, num_channels, page_size, dtype) -> None:
    inputs, rows, sequences = make_inputs(num_channels, dtype, page_size)
    weight, bias = parameters(num_taps, num_channels, dtype)
    for given in (bias, None):
        out = convolve(inputs, weight, given, rows)
        for row, (position, segment) in enumerate(
            zip(rows.positions.tolist(), rows.row_segments.tolist(), strict=True)
        ):
            seen = sequences[segment][max(0, position - num_taps + 1) : position + 1].double()
            terms = seen * weight[num_taps - len(seen) :].double()
            expected = terms.sum(0) + (0 if given is None else given.double())
            limit = torch.finfo(dtype).eps * (expected.abs() + terms.abs().sum(0) * 1e-2) + num_taps * 1e-6
            assert bool(((out[row].double() - expected).abs() <= limit).all())


def test_torchs_convolution_equals_short_conv(convolve) -> None:
    inputs, rows, sequences = make_inputs(48, torch.float32)
    weight, bias = parameters(3, 48, torch.float32)
    out = convolve(inputs, weight, bias, rows)
    for segment, x in enumerate(sequences):
        own = torch.nn.functional.conv1d(x.T[None], weight.T[:, None], bias, padding=2, groups=48)[0, :, : len(x)].T
        mine = rows.row_segments == segment
        torch.testing.assert_close(out[mine], own[rows.positions[mine].long()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_conv_row_has_the_same_bits_in_any_batch(convolve, dtype: torch.dtype) -> None:
    inputs, rows, _ = make_inputs(72, dtype)
    weight, bias = parameters(3, 72, dtype)
    together = convolve(inputs, weight, bias, rows)
    for num_rows in (1, 2, 7):
        for first in range(0, len(together), num_rows):
            part = slice(first, first + num_rows)
            fewer = PagedRows(rows.positions[part], rows.row_segments[part], rows.page_starts, rows.page_ids)
            assert torch.equal(convolve(inputs, weight, bias, fewer), together[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["at once", "two siblings", "a chain", "bushy", "deep", "odd pages"])
def test_a_short_conv_node_has_the_bits_of_its_path_as_a_chain(convolve, name: str, dtype: torch.dtype) -> None:
    tree = make_tree_case(**TREE_CASES[name], num_key_heads=1, num_heads=1, key_size=40, value_size=40, dtype=dtype)
    weight, bias = parameters(4, 40, dtype)
    together = convolve(tree.key_cache.squeeze(2), weight, bias, tree.rows)
    for node in range(len(tree.query)):
        inputs, _, row = tree.chain_of(node)
        assert torch.equal(together[node], convolve(inputs.squeeze(2), weight, bias, row)[0]), node


def test_a_non_finite_value_reaches_only_short_conv_rows_that_see_it(convolve) -> None:
    inputs, rows, _ = make_inputs(16, torch.float32)
    weight, bias = parameters(3, 16, torch.float32)
    before = convolve(inputs, weight, bias, rows)
    (segment, position) = (1, 5)
    page = rows.page_ids[rows.page_starts[segment] + position // 16]
    inputs[page, position % 16] = torch.nan
    after = convolve(inputs, weight, bias, rows)
    sees = (rows.row_segments == segment) & (rows.positions >= position) & (rows.positions < position + 3)
    assert int(sees.sum()) == 3 and bool(after[sees].isnan().all())
    assert torch.equal(after[~sees], before[~sees])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_short_conv_is_used_and_rounds_as_the_reference(dtype: torch.dtype) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    inputs, rows, _ = make_inputs(72, dtype)
    weight, bias = parameters(3, 72, dtype)
    with dispatch.recording() as taken:
        ours = short_conv(inputs, weight, bias, rows)
    assert taken == ["native"]
    expected = short_conv_reference(inputs, weight, bias, rows)
    if dtype == torch.bfloat16:  # products are exact in float32, so nothing depends on fused rounding
        assert torch.equal(ours, expected)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(3, 15), None, "weight"),
        (torch.zeros(0, 16), None, "at least 1"),
        (torch.zeros(3, 16).bfloat16(), None, "bfloat16"),
        (torch.zeros(16, 3).T, None, "weight"),
        (torch.zeros(3, 16), torch.zeros(2, 16), "bias"),
    ],
)
def test_short_conv_shapes_that_do_not_fit_are_rejected(
    weight: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    inputs, rows, _ = make_inputs(16, torch.float32)
    with pytest.raises(ValueError, match=message):
        short_conv(inputs, weight, bias, rows)
    with pytest.raises(ValueError, match="dense"):
        short_conv(inputs.transpose(0, 1), torch.zeros(3, 16), None, rows)
