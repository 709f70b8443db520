"""The int8 kernels of other instructions: equal to the reference candidate bit for bit, tiles in software too."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from betoken.kernels.build import Library
from betoken.kernels.cpu import INT8_NARROW_LIBRARY, CpuKernels, load_cpu_kernels
from betoken.kernels.cpu.grouped import PackedWeight
from betoken.kernels.linear_grouped.int8_rows import INT8_KINDS
from tests.kernels.grouped_weights import cases, draw_weight

SHAPES = [((101, 320), 32), ((33, 272), 16), ((64, 300), 128)]
CASES = [case for case in cases(SHAPES) if case[0] in INT8_KINDS]
NUM_ROWS = (1, 6, 16, 35)
SOFTWARE_TILES = ("-include", str(Path(__file__).parent / "emulated_tiles.h"))


def variant(name: str, *flags: str, narrow: bool = False) -> Library:
    shared = tuple(flag for flag in INT8_NARROW_LIBRARY.flags if narrow or flag != "-DBETOKEN_NARROW")
    headers = (*INT8_NARROW_LIBRARY.headers, Path(__file__).parent / "emulated_tiles.h")
    return replace(INT8_NARROW_LIBRARY, name=f"int8-{name}-test", flags=(*shared, *flags), headers=headers)


VARIANTS = [
    variant("narrow", narrow=True),
    variant("avx", "-mno-avx512f"),
    variant("tiles", *SOFTWARE_TILES),
    variant("avx-tiles", "-mno-avx512f", *SOFTWARE_TILES),
]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    loaded = load_cpu_kernels()
    if platform.machine() != "x86_64" or loaded is None:
        pytest.skip("other x86 processors need a compiler on an x86 machine")
    loaded.load_grouped()
    loaded.load_int8()
    loaded.set_num_threads(2)
    return loaded


@pytest.mark.parametrize("library", VARIANTS, ids=lambda library: library.name)
def test_an_int8_variant_gives_the_bits_of_the_reference(kernels: CpuKernels, library: Library) -> None:
    before = len(kernels.candidates("int8"))
    kernels.load_int8_variant(library)
    added = range(before, len(kernels.candidates("int8")))
    if not added:
        pytest.skip("these instructions multiply rows of another layout, or not at all")
    if "tiles" in library.name and "tiles" not in kernels.candidates("int8")[before:]:
        pytest.skip("this processor has no products of bytes that sum up in 32 bits")
    for case in CASES:
        packed = PackedWeight.of(draw_weight(*case))
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, packed.num_inputs, generator=torch.Generator().manual_seed(num_rows)) * 10
            outs = []
            for candidate in (0, *added):
                kernels.choose("int8", packed.code, num_rows, candidate)
                outs.append(torch.ops.betoken.linear_int8(x, packed.data, None, packed.num_outputs, packed.code))
            kernels.choose("int8", packed.code, num_rows, 0)
            assert all(torch.equal(out, outs[0]) for out in outs), (case, num_rows)


def test_the_number_of_rows_a_pass_changes_no_bit(kernels: CpuKernels) -> None:
    num_candidates = len(kernels.candidates("exact"))
    for case in cases(SHAPES):
        packed = PackedWeight.of(draw_weight(*case))
        weight = (packed.data, None, packed.num_outputs, packed.code)
        for num_rows in (5, 13):
            x = torch.randn(num_rows, packed.num_inputs, generator=torch.Generator().manual_seed(num_rows))
            for rows in (x, x.bfloat16()):
                outs = []
                for candidate in reversed(range(num_candidates)):
                    kernels.choose("exact", packed.code, num_rows, candidate)
                    outs.append(torch.ops.betoken.linear_grouped(rows, *weight))
                assert all(torch.equal(out, outs[-1]) for out in outs), (case, num_rows)
