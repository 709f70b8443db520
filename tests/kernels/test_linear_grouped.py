"""Products by weights of few bits: which number a code is, the sums against torch's, rows one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from betoken.kernels.cpu import CpuKernels, load_cpu_kernels
from betoken.kernels.cpu.grouped import PackedWeight, pack_experts
from betoken.kernels.linear_grouped import Grouped, linear_grouped
from betoken.kernels.linear_grouped.weight import CodeKind
from tests.kernels.grouped_weights import OFFSETS, SCALES, WAYS, cases, draw_weight

SHAPES = [((96, 64), 32), ((101, 576), 32), ((33, 272), 16), ((65, 300), 128), ((1, 512), 32), ((64, 40), 64)]
CASES = cases(SHAPES)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None:
        pytest.skip("no compiler: the CPU kernels cannot be built here")
    loaded.load_grouped()
    return loaded


def test_every_scaling_of_grouped_weights_is_tested() -> None:
    assert {scales for scales, _ in WAYS} == set(SCALES) and {offsets for _, offsets in WAYS} == set(OFFSETS)


def test_a_weight_is_scale_times_code_less_zero_and_offset() -> None:
    low = torch.tensor([[0x21, 0x43, 0xF0] + [0] * 13], dtype=torch.uint8)
    weight = Grouped("int4", 32, 32, low, torch.tensor([[0.5]]).half(), zero=8, offsets=torch.tensor([[100.0]]))
    assert weight.dequantised()[0, :6].tolist() == [96.5, 97.0, 97.5, 98.0, 96.0, 103.5]
    high = torch.tensor([[0b101, 0, 0, 0]], dtype=torch.uint8)
    fives = Grouped("int5", 32, 32, low, torch.tensor([[1.0]]), high=high)
    assert fives.dequantised()[0, :6].tolist() == [17, 2, 19, 4, 0, 15]
    high = torch.tensor([[0b110001, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    sixes = Grouped(
        "int6", 32, 32, low, torch.tensor([[3]], dtype=torch.uint8), high=high, scale_units=low.new_ones(1, 1).half()
    )
    assert sixes.dequantised()[0, :6].tolist() == [51, 6, 153, 12, 0, 45]
    crumbs, third = torch.tensor([[0b11_10_01_00] + [0] * 7]).byte(), torch.tensor([[0b1001, 0, 0, 0]]).byte()
    threes = Grouped("int3", 32, 32, crumbs, torch.tensor([[2.0]]), high=third, zero=4)
    assert threes.dequantised()[0, :5].tolist() == [0, -6, -4, 6, -8]
    levels = replace(threes, kind="iq2", zero=0).dequantised()[0, :5]
    assert levels.tolist() == [-2, 6.25, 10.75, 0, 2]
    signed = Grouped("int8", 16, 16, torch.tensor([[-128, 127] + [0] * 14], dtype=torch.int8), torch.tensor([[2.0]]))
    assert signed.dequantised()[0, :2].tolist() == [-256, 254]
    zeros = Grouped("int4", 32, 16, low, torch.tensor([[1.0, 2.0]]), zeros=torch.tensor([[1, 3]], dtype=torch.uint8))
    assert zeros.dequantised()[0, [0, 1, 5, 16]].tolist() == [0, 1, 14, -6]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("shape", "group"), SHAPES, ids=str)
def test_packed_grouped_weights_are_exact(
    kernels: CpuKernels, shape: tuple[int, int], group: int, num_threads: int
) -> None:
    kernels.set_num_threads(num_threads)
    for case in cases([(shape, group)]):
        weight = draw_weight(*case)
        packed = PackedWeight.of(weight)
        ids = torch.arange(shape[0]).flip(0)
        rows = torch.ops.betoken.grouped_rows(ids, packed.data, *shape, packed.code)
        assert torch.equal(rows, weight.dequantised()[ids]), case


@pytest.mark.parametrize(("kind", "shape", "group", "scales", "offsets"), CASES)
def test_the_grouped_product_is_torchs_and_equal_per_row(
    kernels: CpuKernels, kind: CodeKind, shape: tuple[int, int], group: int, scales: str, offsets: str
) -> None:
    """Types and numbers of threads alternate; the slow run has all of both for each case."""
    case = (kind, shape, group, scales, offsets)
    place = CASES.index(case)
    kernels.set_num_threads(1 + place // 2 % 2)
    check_product(case, (torch.float32, torch.bfloat16)[place % 2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_grouped_product_is_torchs_in_every_type_with_any_number_of_threads(
    kernels: CpuKernels, num_threads: int, dtype: torch.dtype
) -> None:
    kernels.set_num_threads(num_threads)
    for case in CASES:
        check_product(case, dtype)


def check_product(case: tuple[CodeKind, tuple[int, int], int, str, str], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    _, shape, *_ = case
    weight = draw_weight(*case)
    packed = PackedWeight.of(weight)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    x = torch.randn(70, shape[1], generator=generator).to(dtype)
    for given in (bias, None):
        out = torch.ops.betoken.linear_grouped(x, packed.data, given, shape[0], packed.code)
        expected = x.double() @ weight.dequantised().double().T + (0 if given is None else given.double())
        sums = torch.ops.betoken.linear_grouped_sums(x, packed.data, given, shape[0], packed.code)
        assert sums.dtype == torch.float32 and torch.equal(sums.to(dtype), out), case
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max(), case
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 15, 25, 33):
            for part in (slice(None, num_rows), slice(-num_rows, None)):
                alone = torch.ops.betoken.linear_grouped(x[part], packed.data, given, shape[0], packed.code)
                assert torch.equal(alone, out[part]), (case, part)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "scales"), [("int4", "half"), ("e2m1", "powers"), ("nf4", "float"), ("int3", "half")])
def test_a_row_of_grouped_experts_uses_its_own_expert(
    kernels: CpuKernels, kind: CodeKind, scales: str, dtype: torch.dtype, num_threads: int
) -> None:
    kernels.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(4)
    weight = draw_weight(kind, (4 * 45, 100), 32, scales)
    packed = pack_experts(weight, 4)
    x = torch.randn(40, 100, generator=generator).to(dtype)
    bias = torch.randn(4, 45, generator=generator).to(dtype)
    ids = torch.randint(3, (40,), generator=generator)
    out = torch.ops.betoken.expert_linear_grouped(x, packed.data, bias, ids, 45, packed.code)
    for expert in range(3):
        own = PackedWeight.of(weight.rows(slice(45 * expert, 45 * expert + 45)))
        expected = torch.ops.betoken.linear_grouped(x[ids == expert], own.data, bias[expert], 45, own.code)
        assert torch.equal(out[ids == expert], expected)
    assert torch.equal(
        torch.ops.betoken.expert_linear_grouped(x[7:8], packed.data, bias, ids[7:8], 45, packed.code)[0], out[7]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_is_torchs_product_and_equal_per_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = draw_weight("int4", (1100, 1000), 128, "half", "zeros")
    x, bias = torch.randn(37, 1000, generator=generator).to(dtype), torch.randn(1100, generator=generator).to(dtype)
    out = linear_grouped(x, weight, bias)
    expected = x.double() @ weight.dequantised().double().T + bias.double()
    assert (out.double() - expected).abs().max() <= 8e-3 * expected.abs().max()
    assert torch.equal(linear_grouped(x, weight, bias, keeps_sums=True).to(dtype), out)
    assert len(list(weight.slices())) > 1
    for num_rows in (1, 2, 7, 16, 33):
        assert torch.equal(linear_grouped(x[:num_rows].contiguous(), weight, bias), out[:num_rows])


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


def test_the_reference_dequantises_a_megabyte_at_a_time() -> None:
    """Each layer runs by it once at load, and a worker may have little more memory than its weights take."""
    weight = draw_weight("int6", (2048, 1024), 16, "signed units")
    with Largest() as largest:
        linear_grouped(torch.ones(2, 1024), weight)
    assert largest.num_bytes <= max(1 << 20, weight.values.nbytes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"group": 48}, "group: 48 is neither 16 nor a multiple of 32"),
        ({"scales": torch.ones(96, 3)}, r"scales: \[96, 3\] torch.float32, not contiguous \[N, 2\]"),
        ({"scales": torch.ones(64, 2)}, "scales: 64 rows, not 96"),
        ({"high": torch.ones(96, 8, dtype=torch.uint8)}, "high: int4 codes have 0 bits above their low 4"),
        ({"kind": "nf4", "zero": 8}, "zeros: not with nf4 codes"),
        ({"order": torch.arange(32).int()}, r"order: \[32\] torch.int32, not \[64\]"),
        ({"zero": 256}, "zero: 256 is outside 0 to 255"),
        ({"zeros": torch.ones(96, 2)}, "zeros: .* not contiguous"),
        ({"offsets": torch.ones(96, 2), "zeros": torch.ones(96, 2).byte()}, "offsets: not with zeros"),
        ({"offsets": torch.ones(96, 2)}, "offsets: .* torch.float32 scales"),
    ],
)
def test_grouped_tensors_that_do_not_fit_are_rejected(change: dict[str, object], complaint: str) -> None:
    fields = {
        "kind": "int4",
        "num_inputs": 64,
        "group": 32,
        "values": torch.ones(96, 32, dtype=torch.uint8),
        "scales": torch.ones(96, 2),
    }
    with pytest.raises(ValueError, match=complaint):
        Grouped(**fields | change)  # type: ignore[arg-type]


def test_packed_weights_of_another_shape_are_not_read_beyond_their_end(kernels: CpuKernels) -> None:
    packed = PackedWeight.of(draw_weight("int4", (64, 64), 32))
    for num_outputs, num_inputs in ((96, 64), (64, 128)):
        with pytest.raises(RuntimeError, match="packed weights of another shape"):
            torch.ops.betoken.linear_grouped(torch.ones(2, num_inputs), packed.data, None, num_outputs, packed.code)
    with pytest.raises(RuntimeError, match="row 64 of a weight with 64"):
        torch.ops.betoken.grouped_rows(torch.tensor([64]), packed.data, 64, 64, packed.code)
