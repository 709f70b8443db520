"""The row-independent products compile for a GPU without a device, both tiles loaded ahead in wide loads."""

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from betoken.kernels import product_tiles
from betoken.kernels.expert_linear import kernel as experts
from betoken.kernels.linear import kernel as linear

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = {"x_ptr", "weight_ptr", "bias_ptr", "out_ptr"}
INT32 = {"slot_starts_ptr", "tile_ends_ptr"}
MAX_SHARED_BYTES = 99 * 1024
"""Shared memory of a program on the smallest GPUs that have these types."""
BLOCKS = {"BLOCK_OUTPUTS": 64, "RANGE_BLOCKS": 8}
EXPERTS = {"NUM_EXPERTS": 8, "BLOCK_EXPERTS": 16}
# name: kernel, constants (arguments that are 1 or None among them), whether it multiplies
KERNELS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "linear": (linear._product, BLOCKS, True),
    "experts": (experts._product, BLOCKS | EXPERTS | {"input_stride": 1, "IS_TRANSPOSED": False}, True),
    "transposed experts": (experts._product, BLOCKS | EXPERTS | {"output_stride": 1, "IS_TRANSPOSED": True}, True),
    "tiles": (experts._cut_tiles, {"BLOCK_EXPERTS": 16, "BLOCK_ROWS": 16}, False),
    "ranges": (product_tiles._add_ranges, {"NUM_RANGES": 3, "BLOCK": 256, "bias_rows_ptr": None}, False),
    "experts' ranges": (product_tiles._add_ranges, {"NUM_RANGES": 3, "BLOCK": 256}, False),
}
LATER = [
    ("experts", "fp16"),
    ("transposed experts", "fp16"),
    ("transposed experts", "fp32"),
    ("experts' ranges", "fp16"),
]
"""Products that only the slow run compiles."""
BLOCK_INPUTS = {"bf16": 128, "fp16": 128, "fp32": 32}


def argument_type(name: str, float_type: str) -> str:
    if name in FLOATS:
        return f"*{float_type}"
    if name == "sums_ptr":
        return "*fp32"
    return "*i32" if name in INT32 else "*i64" if name.endswith("_ptr") else "i32"


def compiled(kernel: Any, constants: dict[str, Any], float_type: str, num_stages: int) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name, float_type) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    exempt = {kernel.arg_names.index(name) for name in kernel.do_not_specialize or () if isinstance(name, str)}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name] != "constexpr" and i not in exempt
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": num_stages})


@pytest.mark.parametrize(
    ("name", "float_type"),
    [
        # float16 is compiled as bfloat16 is: one product shows it; experts in float32 do not depend on the layout
        pytest.param(name, float_type, marks=pytest.mark.slow if (name, float_type) in LATER else ())
        for name in KERNELS
        for float_type in BLOCK_INPUTS
    ],
)
def test_a_row_independent_product_compiles_for_gpus(
    name: str, float_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants, is_product = KERNELS[name]
    if not is_product:
        assert len(compiled(kernel, constants, float_type, 3).asm["cubin"]) > 0
        return
    own = {"BLOCK_INPUTS": BLOCK_INPUTS[float_type], "IN_FLOAT32": float_type == "fp32"}
    for block_rows, num_stages in product_tiles._ROW_TILES:
        for is_even in (True, False) if block_rows == 16 else (True,):
            tile = own | {"BLOCK_ROWS": block_rows, "IS_EVEN": is_even}
            made = compiled(kernel, constants | tile, float_type, num_stages)
            tile_bytes = (64 + block_rows) * own["BLOCK_INPUTS"] * (4 if float_type == "fp32" else 2)
            assert (num_stages - 1) * tile_bytes <= made.metadata.shared <= MAX_SHARED_BYTES  # both sides come ahead
            ptx = made.asm["ptx"]
            copies = [line for line in ptx.splitlines() if "cp.async" in line and "global" in line]
            assert copies and all("0x10" in line for line in copies), "16 bytes at a time"
            assert ("mma" in ptx) == (float_type != "fp32")
