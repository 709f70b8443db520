"""The row-independent linear layer: its value within rounding of the exact one, its rows to the last bit."""

import pytest
import torch

from betoken.kernels.linear import linear
from tests.products import covering

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (63, 5), (64, 128), (200, 130), (96, 2048), (1000, 96)]
"""[N, K]; 96 x 2048 is summed in ranges, and so is a quarter of its terms in float32."""


def make(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if (num_inputs, dtype, device.type) == (2048, torch.float32, "cpu"):  # few terms, as the interpreter is slow
        num_inputs = 544
    generator = torch.Generator().manual_seed(num_rows + num_outputs + num_inputs)
    shapes = ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype).to(device) for shape in shapes)
    return x, weight, bias


def check(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keeps_sums: bool = False
) -> None:
    """At most one rounding of the result's type and one of float32 for each term of the sum."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    num_terms = x.shape[1] + 1
    limit = torch.finfo(out.dtype).eps * exact.abs() + num_terms * torch.finfo(torch.float32).eps * magnitude
    assert out.dtype == (torch.float32 if keeps_sums else x.dtype) and bool(
        ((out.double() - exact).abs() <= limit).all()
    )


@pytest.mark.parametrize(("shape", "dtype"), covering(SHAPES, DTYPES, strength=1, ids=str))
def test_linear_product_is_right_to_rounding(shape, dtype, device, takes_triton):
    for num_rows in (1, 17, 70):
        x, weight, bias = make(num_rows, *shape, dtype, device)
        with takes_triton():
            plain, biased = linear(x, weight), linear(x, weight, bias)
            sums = linear(x, weight, bias, keeps_sums=True)
        check(plain, x, weight, None)
        check(biased, x, weight, bias)
        check(sums, x, weight, bias, keeps_sums=True)
        check(linear(x, weight, bias, keeps_sums=True), x, weight, bias, keeps_sums=True)
        check(linear(x, weight, bias), x, weight, bias)  # the reference, or on a GPU the same again


@pytest.mark.parametrize(("shape", "dtype"), covering([(200, 130), (96, 2048)], DTYPES, strength=1, ids=str))
def test_a_linear_row_has_the_same_bits_in_any_batch(shape, dtype, device, takes_triton):
    # Interpreted, tiles of different heights are products of another library's, so the company stays within one tile.
    companies = (1, 2, 5, 16) if device.type == "cpu" else (1, 2, 5, 16, 17, 32, 33, 64, 65, 128, 200, 300)
    x, weight, bias = make(max(companies), *shape, dtype, device)
    with takes_triton():
        together = linear(x, weight, bias)
        for num_rows in companies:
            assert torch.equal(linear(x[:num_rows].contiguous(), weight, bias), together[:num_rows])
            assert torch.equal(linear(x[-num_rows:].contiguous(), weight, bias), together[-num_rows:])


def test_a_part_of_a_layer_has_the_bits_of_the_whole(device, takes_triton):
    x, weight, bias = make(3, 4096, 512, torch.float32, device)
    with takes_triton():
        whole = linear(x, weight, bias)
        for part in (slice(0, 2048), slice(2048, 4096), slice(64, 192)):
            assert torch.equal(linear(x, weight[part], bias[part], whole_outputs=4096), whole[:, part])
        assert not torch.equal(linear(x, weight[:64], bias[:64]), whole[:, :64])  # another order of the same terms


@pytest.mark.parametrize("num_rows", [16, 17, 32, 33, 64, 65, 128, 129])
def test_tiles_of_every_height_sum_every_term_once(num_rows, device, takes_triton):
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randint(-8, 9, (n, 600), generator=generator).float() for n in (num_rows, 70))
    with takes_triton():  # whole numbers: no sum is rounded
        assert torch.equal(linear(x.to(device), weight.to(device)).cpu(), x @ weight.T)


def test_bad_arguments_of_linear_are_rejected():
    x, weight, bias = make(3, 5, 4, torch.float32, torch.device("cpu"))
    for arguments in (
        (x[0], weight, bias),
        (x.double(), weight, bias),
        (x[:0], weight, bias),
        (x.T.contiguous().T, weight, bias),
        (x, weight.half(), bias),
        (x, weight[:, :3], bias),
        (x, weight, bias[:2]),
        (x, weight.to("meta"), None),
    ):
        with pytest.raises(ValueError, match="must be"):
            linear(*arguments)
