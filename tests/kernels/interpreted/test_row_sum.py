"""Row sums: within float32 rounding of the exact ones, and the same bits in any company."""

import pytest
import torch

from betoken.kernels.row_sum import row_sum

COLUMNS = [1, 63, 64, 1000, 4096, 5000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_row_sums_are_right_and_independent(num_columns, dtype, device, takes_triton):
    generator = torch.Generator().manual_seed(num_columns)
    x = torch.randn(13, num_columns, generator=generator).to(dtype).to(device)
    with takes_triton():
        sums = row_sum(x)
        for num_rows in (1, 2, 5):
            assert torch.equal(row_sum(x[:num_rows].contiguous()), sums[:num_rows])
            assert torch.equal(row_sum(x[-num_rows:].contiguous()), sums[-num_rows:])
    limit = num_columns * torch.finfo(torch.float32).eps * x.double().abs().sum(dim=1)
    for found in (sums, row_sum(x)):
        assert found.dtype == torch.float32 and bool(((found.double() - x.double().sum(dim=1)).abs() <= limit).all())


def test_bad_arguments_of_row_sum_are_rejected():
    x = torch.zeros(3, 4)
    for bad in (x[0], x.double(), x[:, :0], x.T):
        with pytest.raises(ValueError, match="must be contiguous"):
            row_sum(bad)
