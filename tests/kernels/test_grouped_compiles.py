"""The low-bit products compile for three generations of GPUs without a device."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from betoken.kernels import product_tiles
from betoken.kernels.expert_linear_grouped import kernel as experts
from betoken.kernels.linear_grouped import kernel as linear
from tests.products import covering

CAPABILITIES = (80, 90, 100)
MAX_SHARED_BYTES = 99 * 1024
"""Shared memory of a program on the smallest GPUs that have these types."""
FLOATS = {"x_ptr", "bias_ptr"}
OPTIONAL = {"high_ptr", "scale_units_ptr", "zeros_ptr", "offsets_ptr", "offset_units_ptr", "table_ptr"}
# name: kind, how scales are stored and their type, group, types of the tensors that a format may lack
FORMATS: dict[str, tuple[str, str, str, int, dict[str, str]]] = {
    "w4a16": ("int4", "numbers", "bf16", 128, {}),
    "w4a16 with zeros": ("int4", "numbers", "fp16", 32, {"zeros_ptr": "u8"}),
    "w8a16": ("int8", "numbers", "bf16", 4096, {}),
    "llm.int8": ("snorm8", "numbers", "fp32", 4096, {}),
    "fp8": ("float8", "numbers", "fp32", 128, {}),
    "gptq 2": ("int2", "numbers", "fp16", 128, {"zeros_ptr": "u8"}),
    "mxfp4": ("e2m1", "powers", "u8", 32, {}),
    "nf4": ("nf4", "numbers", "fp32", 64, {"table_ptr": "fp32"}),
    "q4_1": ("int4", "numbers", "fp16", 32, {"offsets_ptr": "fp16"}),
    "q4_k": ("int4", "units", "u8", 32, {"scale_units_ptr": "fp16", "offsets_ptr": "u8", "offset_units_ptr": "fp16"}),
    "q5_0": ("int5", "numbers", "fp16", 32, {"high_ptr": "u8"}),
    "q5_1": ("int5", "numbers", "fp16", 32, {"high_ptr": "u8", "offsets_ptr": "fp16"}),
    "q5_k": (
        *("int5", "units", "u8", 32),
        {"high_ptr": "u8", "scale_units_ptr": "fp16", "offsets_ptr": "u8", "offset_units_ptr": "fp16"},
    ),
    "q8_0": ("int8", "numbers", "fp16", 32, {}),
    "fp4": ("fp4", "numbers", "fp32", 64, {"table_ptr": "fp32"}),
    "q6_k": ("int6", "units", "i8", 16, {"high_ptr": "u8", "scale_units_ptr": "fp16"}),
    "q2_k": ("int2", "units", "u8", 16, {"scale_units_ptr": "fp16", "offsets_ptr": "u8", "offset_units_ptr": "fp16"}),
    "q3_k": ("int3", "units", "i8", 16, {"high_ptr": "u8", "scale_units_ptr": "fp16"}),
    "iq4_xs": ("iq4", "units", "i8", 32, {"table_ptr": "fp32", "scale_units_ptr": "fp16"}),
    "iq2_xs": ("iq2", "units", "u8", 16, {"high_ptr": "u8", "table_ptr": "fp32", "scale_units_ptr": "fp16"}),
}
INEXACT = ("nf4", "fp4")
"""Kinds whose numbers bfloat16 does not hold."""
TRIED_ALWAYS = ("w4a16 with zeros", "w8a16", "fp8", "mxfp4")
"""Formats that are compiled for every generation in the default run; the others in the slow one."""
SELDOM = tuple(name for name in FORMATS if name not in TRIED_ALWAYS)
IN_EVERY_TYPE = ("w4a16", "fp8", "nf4")
"""Formats that are compiled for rows of every type in the default run; the others for bfloat16."""
LATER = ("q5_1", "q5_k", "q8_0", "fp4", "q2_k", "q3_k")
"""Formats of pieces that others have, too: compiled in the slow run only."""
PRODUCTS = {"linear": linear._product, "experts": experts._product}
EXPERTS: dict[str, Any] = {"NUM_EXPERTS": 8, "BLOCK_EXPERTS": 16}


def compiled(kernel: Any, name: str, float_type: str, block_rows: int, num_stages: int, capability: int) -> Any:
    kind, scales, scale_type, group, given = FORMATS[name]
    is_inexact = kind in INEXACT
    block_inputs = min(32 if float_type == "fp32" else 128, group)
    constants: dict[str, Any] = {
        **{"KIND": kind, "SCALES": scales, "ZERO": 8 if kind == "int4" else 0, "GROUP": group, "FACTOR": 1.0},
        **{"NUM_PARTS": 3 if is_inexact and float_type == "bf16" else 1, "RANGE_BLOCKS": 8, "IS_EVEN": True},
        "IN_FLOAT32": float_type == "fp32" or (is_inexact and float_type == "fp16"),
        **{"BLOCK_ROWS": block_rows, "BLOCK_OUTPUTS": 64, "BLOCK_INPUTS": block_inputs},
        **dict.fromkeys(OPTIONAL - given.keys()),
    }
    types = {"values_ptr": "*u8", "scales_ptr": f"*{scale_type}", "sums_ptr": "*fp32", "slots_ptr": "*i64"}
    types |= {"slot_starts_ptr": "*i32", "tile_ends_ptr": "*i32", **dict.fromkeys(FLOATS, f"*{float_type}")}
    types |= {argument: f"*{type_name}" for argument, type_name in given.items()}
    if kernel is experts._product:
        constants |= EXPERTS
    names = kernel.arg_names
    signature = {argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in names}
    places = {(names.index(argument),): value for argument, value in constants.items()}
    exempt = {names.index(argument) for argument in kernel.do_not_specialize or () if isinstance(argument, str)}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(names)
        if signature[argument] != "constexpr" and i not in exempt
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "num_stages": num_stages})


@pytest.mark.parametrize(
    ("name", "float_type"),
    [
        pytest.param(
            *(name, float_type),
            marks=pytest.mark.slow if name in LATER or (float_type != "bf16" and name not in IN_EVERY_TYPE) else (),
        )
        for name in FORMATS
        for float_type in ("bf16", "fp16", "fp32")
    ],
)
def test_a_low_bit_format_compiles_for_gpus(
    name: str, float_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heights = product_tiles._ROW_TILES if name == "w4a16" else product_tiles._ROW_TILES[:1]
    for block_rows, num_stages in heights:
        made = compiled(linear._product, name, float_type, block_rows, num_stages, 90)
        assert made.metadata.shared <= MAX_SHARED_BYTES
        is_half = float_type == "bf16" or (float_type == "fp16" and name not in INEXACT)
        assert ("mma" in made.asm["ptx"]) == is_half


@pytest.mark.parametrize(
    ("name", "product", "capability"),
    [
        *covering(TRIED_ALWAYS, PRODUCTS, CAPABILITIES),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(SELDOM, PRODUCTS, CAPABILITIES)),
    ],
)
def test_a_low_bit_product_compiles_for_every_generation_of_gpus(
    name: str, product: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compiled(PRODUCTS[product], name, "bf16", 16, 4, capability)
    assert len(made.asm["cubin"]) > 0 and made.metadata.shared <= MAX_SHARED_BYTES
