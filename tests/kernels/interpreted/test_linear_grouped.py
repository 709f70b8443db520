"""Products by weights of few bits: within rounding of the exact ones, rows to the last bit alike, experts too."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from betoken.kernels import dispatch
from betoken.kernels.expert_linear_grouped import expert_linear_grouped
from betoken.kernels.linear_grouped import Grouped, linear_grouped
from tests.kernels.grouped_weights import cases, draw_weight
from tests.products import covering, slow_but_every

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [((33, 272), 16), ((9, 300), 128), ((5, 40), 64)]
CASES = [
    *((*case, DTYPES[place % 3]) for place, case in enumerate(cases([((70, 96), 32)]))),
    *((*case, torch.float32) for case in cases(SHAPES)[::5]),
]
EXPERT_CASES = [(*case, DTYPES[place % 3]) for place, case in enumerate(cases([((3 * 40, 96), 32)]))]


def on(weight: Grouped, device: torch.device) -> Grouped:
    return replace(weight, **{name: tensor.to(device) for name, tensor in weight.tensors().items()})


def check(out: Tensor, x: Tensor, numbers: Tensor, bias: Tensor | None) -> None:
    """At most one rounding of the result's type and some of float32 for each term of the sum; numbers [S, N, K]."""
    exact = torch.einsum("sk,snk->sn", x.double(), numbers.double())
    magnitude = torch.einsum("sk,snk->sn", x.double().abs(), numbers.double().abs())
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    limit = torch.finfo(out.dtype).eps * exact.abs() + 2 * (x.shape[1] + 1) * 2**-23 * magnitude + 1e-30
    assert bool(((out.double() - exact).abs() <= limit).all()), (out.double() - exact).abs().max()


@pytest.mark.parametrize(("kind", "shape", "group", "scales", "offsets", "dtype"), CASES)
def test_grouped_product_is_right_to_rounding(kind, shape, group, scales, offsets, dtype, device, takes_triton):
    generator = torch.Generator().manual_seed(3)
    weight = on(draw_weight(kind, shape, group, scales, offsets), device)
    x = torch.randn(17, shape[1], generator=generator).to(dtype).to(device)
    bias = torch.randn(shape[0], generator=generator).to(dtype).to(device)
    numbers = weight.dequantised().expand(len(x), -1, -1)
    # Codes less their zero may cancel against an offset: what is added up is larger than the numbers.
    spread = numbers.abs().amax(2, keepdim=True).expand_as(numbers) if weight.offsets is not None else numbers
    with takes_triton():
        out, sums = linear_grouped(x, weight, bias), linear_grouped(x[:1], weight, None, keeps_sums=True)
    assert out.dtype == dtype and sums.dtype == torch.float32
    if weight.offsets is None:
        check(out, x, numbers, bias)
        check(sums, x[:1], numbers[:1], None)
    else:
        exact = torch.einsum("sk,snk->sn", x.double(), numbers.double()) + bias.double()
        magnitude = 64 * torch.einsum("sk,snk->sn", x.double().abs(), spread.double()) + 1
        assert bool(((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 2**-20 * magnitude).all())


FORMATS = [("int4", "half", "zeros"), ("int4", "half", "half"), ("int8", "bfloat", "none"), ("nf4", "float", "none")]


@pytest.mark.parametrize(("stored", "dtype"), covering(FORMATS, DTYPES, strength=1, ids=str))
def test_a_grouped_linear_row_has_the_same_bits_in_any_batch(stored, dtype, device, takes_triton):
    kind, scales, offsets = stored
    # Interpreted, tiles of different heights are products of another library's, so the company stays within one tile.
    companies = (1, 5, 16) if device.type == "cpu" else (1, 2, 5, 16, 17, 32, 33, 64, 65, 128, 200, 300)
    shape = (60, 1024) if device.type == "cpu" else (96, 2048)  # both are summed in ranges
    weight = on(draw_weight(kind, shape, 64, scales, offsets), device)
    x = torch.randn(max(companies), shape[1], generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    with takes_triton():
        together = linear_grouped(x, weight)
        for num_rows in companies:
            assert torch.equal(linear_grouped(x[:num_rows].contiguous(), weight), together[:num_rows])
            assert torch.equal(linear_grouped(x[-num_rows:].contiguous(), weight), together[-num_rows:])


@pytest.mark.parametrize("num_rows", [16, 17, 32, 33, 64, 65, 128, 129])
def test_tiles_of_every_height_sum_every_term_once(num_rows, device, takes_triton):
    weight = draw_weight("int8", (70, 600), 32, "half")
    weight.scales.fill_(1.0)
    x = torch.randint(-8, 9, (num_rows, 600), generator=torch.Generator().manual_seed(num_rows)).float()
    with takes_triton():  # whole numbers: no sum is rounded
        found = linear_grouped(x.to(device), on(weight, device))
    assert torch.equal(found.cpu(), x @ weight.dequantised().T)


def test_inputs_of_a_grouped_linear_are_permuted(device, takes_triton):
    weight = draw_weight("int4", (40, 96), 32, "half", "zeros", is_ordered=True)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    expected = x.double() @ weight.dequantised().double().T
    assert not torch.equal(weight.order, torch.arange(96))
    with takes_triton():
        found = linear_grouped(x.to(device), on(weight, device))
    assert (found.cpu().double() - expected).abs().max() < 1e-5
    assert (linear_grouped(x, weight).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("kind", "shape", "group", "scales", "offsets", "dtype"), slow_but_every(3, EXPERT_CASES))
def test_a_row_goes_through_the_expert_it_names(kind, shape, group, scales, offsets, dtype, device, takes_triton):
    generator = torch.Generator().manual_seed(4)
    weight = on(draw_weight(kind, shape, group, scales, offsets), device)
    ids = torch.tensor([0] * 17 + [2, 0, 2], device=device)
    x = torch.randn(len(ids), shape[1], generator=generator).to(dtype).to(device)
    bias = torch.randn(3, 40, generator=generator).to(dtype).to(device)
    with takes_triton():
        out = expert_linear_grouped(x, weight, bias, ids, 3)
    with dispatch.override("reference"):
        expected = expert_linear_grouped(x, weight, bias, ids, 3)
    for expert in (0, 2):
        own = weight.rows(slice(40 * expert, 40 * expert + 40))
        alone = linear_grouped(x[ids == expert], own, bias[expert])
        assert torch.equal(expected[ids == expert], alone) or device.type == "cuda"
    scale = expected.float().abs().max()
    assert (out.float() - expected.float()).abs().max() <= (2 * torch.finfo(dtype).eps + 1e-5) * scale


def test_grouped_experts_are_summed_in_ranges_too(device, takes_triton):
    weight = on(draw_weight("e2m1", (2 * 24, 2048), 32, "powers"), device)
    ids = torch.tensor([1, 0, 1, 1], device=device)
    x, bias = torch.ones(4, 2048, device=device), torch.ones(2, 24, device=device)
    with takes_triton():
        out = expert_linear_grouped(x, weight, bias, ids, 2)
        alone = expert_linear_grouped(x[:1], weight, bias, ids[:1], 2)
    assert torch.equal(alone[0], out[0]) and torch.equal(out[0], out[3]) and not torch.equal(out[0], out[1])
    expected = weight.dequantised().sum(1).reshape(2, 24)[ids] + 1
    assert (out - expected).abs().max() <= 1e-5 * weight.dequantised().abs().sum(1).max()


def test_bad_arguments_of_linear_grouped_are_rejected():
    weight, x, ids = draw_weight("int4", (6, 64), 32), torch.ones(2, 64), torch.tensor([0, 1])
    for arguments in (
        (x, weight, None, ids, 4),
        (x, weight, None, ids, 0),
        (x[:, :32].contiguous(), weight, None, ids, 2),
        (x, weight, torch.ones(2, 4), ids, 2),
        (x, weight, None, ids[:1], 2),
        (x, weight, None, ids + 1, 2),
        (x, draw_weight("int4", (6, 64), 32, is_ordered=True), None, ids, 2),
    ):
        with pytest.raises(ValueError, match="must be"):
            expert_linear_grouped(*arguments)
