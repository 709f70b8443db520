"""The Triton short convolution gives the bits of its reference, for chains and trees."""

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.rows import PagedRows, TreePaths
from betoken.kernels.short_conv import short_conv
from tests.kernels.paged import make_case
from tests.kernels.trees import TREE_CASES, make_tree_case
from tests.products import covering


def moved(rows: PagedRows, device: torch.device) -> PagedRows:
    paths = rows.paths and TreePaths(rows.paths.starts.to(device), rows.paths.slots.to(device))
    columns = (rows.positions, rows.row_segments, rows.page_starts, rows.page_ids)
    return PagedRows(*(column.to(device) for column in columns), paths)


@pytest.mark.parametrize(
    ("shape", "name", "dtype"),
    covering([(3, 64), (4, 600), (1, 3)], ["chains", "bushy", "odd pages"], [torch.float32, torch.bfloat16]),
)
def test_triton_short_conv_equals_the_reference(
    shape: tuple[int, int], name: str, dtype: torch.dtype, device: torch.device, takes_triton
) -> None:
    num_taps, num_channels = shape
    sizes = {"num_heads": 1, "num_key_heads": 1, "key_size": num_channels, "value_size": 1}
    if name == "chains":
        _, inputs, _, rows, _ = make_case([(70, 3), (2, 2), (1, 1)], **sizes, dtype=dtype)
    else:
        tree = make_tree_case(**TREE_CASES[name], **sizes, dtype=dtype)
        inputs, rows = tree.key_cache, tree.rows
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_taps, num_channels, generator=generator).to(dtype)
    bias = torch.randn(num_channels, generator=generator).to(dtype)
    for given in (None, bias):
        with dispatch.override("reference"):
            expected = short_conv(inputs.squeeze(2), weight, given, rows)
        with takes_triton():
            there = None if given is None else given.to(device)
            ours = short_conv(inputs.squeeze(2).to(device), weight.to(device), there, moved(rows, device))
        if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter truncates, a device rounds
            torch.testing.assert_close(ours, expected, rtol=torch.finfo(dtype).eps, atol=0)
        else:
            assert torch.equal(ours.cpu(), expected)
