"""Products of weights of few bits and rows rounded to int8: equal to their definition bit for bit, row by row."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from betoken.kernels.cpu import CpuKernels, load_cpu_kernels
from betoken.kernels.cpu.grouped import PackedWeight, pack_experts
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import FACTORS, CodeKind
from betoken.kernels.linear_grouped.int8_rows import INT8_KINDS, SMALLEST, round_rows, rounded
from betoken.kernels.linear_grouped.weight import UNIT_INPUTS
from tests.kernels.grouped_weights import cases, draw_weight

SHAPES = [((101, 576), 32), ((33, 272), 16), ((65, 300), 128), ((1, 512), 32), ((64, 40), 64)]
CASES = [case for case in cases(SHAPES) if case[0] in INT8_KINDS]
NUM_ROWS = 11
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None:
        pytest.skip("no compiler: the CPU kernels cannot be built here")
    loaded.load_grouped()
    loaded.load_int8()
    loaded.set_num_threads(request.param)
    return loaded


def draw_rows(num_inputs: int, num_rows: int = NUM_ROWS) -> Tensor:
    """Rows of several sizes, with a block of zeros and one of tiny numbers."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(num_rows, num_inputs, generator=generator) * torch.logspace(-3, 3, num_rows)[:, None]
    rows[0, :32] = 0
    rows[1, :32] *= 1e-35
    return rows


def codes_and_scales(x: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """The definition: x is about code * scale, by blocks of 32."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2)
    is_zero = largest < np.float32(2.0**-100)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(is_zero, np.float32(0), np.float32(127) / largest)
    codes = np.rint(blocks * inverse[..., None]).astype(np.int64)
    return codes, np.where(is_zero, np.float32(0), largest / np.float32(127))


def in_units(numbers: Tensor, units: Tensor | None, group: int) -> Floats:
    spread = numbers.float()
    if units is not None:
        spread = spread * units.float().repeat_interleave(UNIT_INPUTS // group, dim=1)[:, : numbers.shape[1]]
    return spread.numpy()


def product(x: Tensor, weight: Grouped) -> Floats:
    """The definition: a block's integer sum times (scale * scale of x), then the offset, blocks in order."""
    block = 16 if weight.group == 16 else 32
    numbers, scales_of_x = codes_and_scales(x.float().numpy())
    numbers = numbers.reshape(len(x), -1, block)
    padding = numbers.shape[1] * block - weight.num_inputs
    codes = np.pad(weight._codes().numpy().astype(np.int64) - weight.zero, ((0, 0), (0, padding)))
    codes = codes.reshape(len(codes), -1, block)
    scales = in_units(weight.scales, weight.scale_units, weight.group) * np.float32(FACTORS.get(weight.kind, 1))
    offsets = None
    if weight.zeros is not None:
        offsets = -weight.zeros.float().numpy() * scales
    elif weight.offsets is not None:
        offsets = in_units(weight.offsets, weight.offset_units, weight.group)
    total = np.zeros((len(x), len(codes)), np.float32)
    for place in range(-(-weight.num_inputs // block)):
        group, scale_of_x = place * block // weight.group, scales_of_x[:, place * block // 32]
        sums = (numbers[:, place] @ codes[:, place].T).astype(np.float32)
        total += sums * (scales[:, group][None] * scale_of_x[:, None])
        if offsets is not None:
            sum_of_x = numbers[:, place].sum(axis=1).astype(np.float32) * scale_of_x
            total += offsets[:, group][None] * sum_of_x[:, None]
    return total


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, name: str = "linear_int8") -> Tensor:
    out: Tensor = getattr(torch.ops.betoken, name)(x, weight.data, bias, weight.num_outputs, weight.code)
    return out


@pytest.mark.parametrize(("kind", "shape", "group", "scales", "offsets"), CASES)
def test_an_int8_product_equals_its_definition_bit_for_bit(
    kernels: CpuKernels, kind: CodeKind, shape: tuple[int, int], group: int, scales: str, offsets: str
) -> None:
    weight = draw_weight(kind, shape, group, scales, offsets)
    packed, bias = PackedWeight.of(weight), torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        x = draw_rows(shape[1]).to(dtype)
        expected = torch.from_numpy(product(x, weight))
        sums = run(x, packed, name="linear_int8_sums")
        assert torch.equal(sums, expected)
        out = run(x, packed, bias.to(dtype))
        assert torch.equal(out, (expected + bias.to(dtype).float()).to(dtype))
        parts = [run(x[start : start + size], packed) for start, size in ((0, 1), (1, 2), (3, 5), (8, 3))]
        assert torch.equal(torch.cat(parts), run(x, packed))


@pytest.mark.parametrize("kind", INT8_KINDS)
def test_the_largest_codes_of_an_int8_product_do_not_overflow(kernels: CpuKernels, kind: CodeKind) -> None:
    weight = draw_weight(kind, (32, 64), 16)
    for tensor in (weight.values, weight.high):
        if tensor is not None:
            tensor.fill_(-128 if tensor.dtype == torch.int8 else 255)
    weight.scales.fill_(1)
    x = torch.ones(3, 64) * torch.tensor([[127.0], [-127.0], [1.0]])
    assert torch.equal(run(x, PackedWeight.of(weight)), torch.from_numpy(product(x, weight)))


def test_rounded_rows_are_codes_times_scales() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = draw_rows(300).to(dtype)
        codes, scales = round_rows(x)
        expected_codes, expected_scales = codes_and_scales(x.float().numpy())
        assert np.array_equal(codes.numpy(), expected_codes) and np.array_equal(scales.numpy(), expected_scales)
        limits = scales.repeat_interleave(32, 1)[:, :300] * 0.5001 + SMALLEST
        assert ((rounded(x) - x.float()).abs() <= limits).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_int8_product_of_a_row_that_is_not_finite_is_not_finite(kernels: CpuKernels, value: float) -> None:
    x = draw_rows(64)
    x[4, 40] = value
    out = run(x, PackedWeight.of(draw_weight("int4", (96, 64), 32)))
    assert out.isfinite().all(dim=1).tolist() == [row != 4 for row in range(NUM_ROWS)]
    assert not out[4].isfinite().any()


def test_an_int8_product_of_many_rows_equals_each_row_alone(kernels: CpuKernels) -> None:
    packed = PackedWeight.of(draw_weight("int6", (200, 1504), 16, "signed units"))
    x = draw_rows(1504, 70).bfloat16()
    assert torch.equal(run(x, packed), torch.cat([run(row[None], packed) for row in x]))


def test_an_int8_product_rejects_codes_that_are_not_integers(kernels: CpuKernels) -> None:
    packed = PackedWeight.of(draw_weight("float8", (32, 64), 32))
    with pytest.raises(RuntimeError, match="codes of kind 9 have no int8 product"):
        run(torch.ones(1, 64), packed)


def test_an_int8_product_of_experts_equals_each_expert_alone(kernels: CpuKernels) -> None:
    weight = draw_weight("int4", (4 * 45, 100), 32)
    packed, x = pack_experts(weight, 4), draw_rows(100, 40)
    bias = torch.randn(4, 45, generator=torch.Generator().manual_seed(4))
    ids = torch.arange(40) % 3
    out = torch.ops.betoken.expert_linear_int8(x, packed.data, bias, ids, 45, packed.code)
    for expert in range(3):
        own = PackedWeight.of(weight.rows(slice(45 * expert, 45 * expert + 45)))
        assert torch.equal(out[ids == expert], run(x[ids == expert], own, bias[expert]))
