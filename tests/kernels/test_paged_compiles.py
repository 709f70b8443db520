"""The kernels of paged keys compile for GPUs without a device, without fused rounding."""

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from betoken.kernels.attention import kernel as attending
from betoken.kernels.kv_compact import kernel as compacting
from betoken.kernels.kv_write import kernel as writing
from betoken.kernels.short_conv import kernel as convolving

TARGETS = {name: GPUTarget("cuda", name, 32) for name in (80, 90, 100)}
CACHED = {"query", "key", "value", "key_cache", "value_cache", "sinks", "slopes", "out", "inputs", "weight", "bias"}
CONVOLVE = {"NUM_CHANNELS": 1000, "NUM_TAPS": 3, "PAGE_SIZE": 16, "BLOCK": 512, "HAS_BIAS": True, "HAS_TREES": True}
FLOATS = {"part_maximum", "part_total", "part_sums"}
INT64 = {"sources", "targets", "starts"}
SCALARS = {
    "scale": "fp32",
    "softcap": "fp32",
    "window": "i32",
    "span": "i32",
    "num_segments": "i32",
    "num_chunks": "i32",
}
SIZES = {"NUM_HEADS": 8, "KEY_SIZE": 128, "VALUE_SIZE": 128}
ATTEND = SIZES | {"GROUP": 4, "PAGE_SIZE": 16, "ROWS": 8, "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_E": 128}
EVERYTHING = {
    "HAS_WINDOW": True,
    "HAS_SPAN": True,
    "HAS_SOFTCAP": True,
    "HAS_SLOPES": True,
    "HAS_TREES": True,
    "HAS_SINKS": True,
}
NOTHING = dict.fromkeys(EVERYTHING, False)
FOLD = {"NUM_QUERY_HEADS": 32, "VALUE_SIZE": 128, "BLOCK_E": 128}
# kernel, constants
KERNELS = [
    (attending._attend, ATTEND | EVERYTHING | {"IS_SPLIT": False, "IS_INTERPRETED": False}),
    (attending._attend, ATTEND | NOTHING | {"IS_SPLIT": True, "IS_INTERPRETED": False}),
    (attending._fold_chunks, FOLD | {"HAS_WINDOW": True, "HAS_SPAN": True, "HAS_SINKS": True}),
    (writing._write, SIZES | {"PAGE_SIZE": 16, "BLOCK": 128, "HAS_TREES": True}),
    (compacting._compact, SIZES | {"BLOCK": 128}),
    (convolving._convolve, CONVOLVE),
]


def argument_type(name: str) -> str:
    if name in SCALARS or name.endswith("_stride") or name == "num_splits":
        return SCALARS.get(name, "i32")
    if name in CACHED:
        return "*bf16"
    return "*fp32" if name in FLOATS else "*i64" if name in INT64 else "*i32"


@pytest.mark.parametrize(
    "target", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("kernel", "constants"), KERNELS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_paged_kernel_compiles_for_gpus(
    kernel: Any, constants: dict[str, Any], target: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": 4, "enable_fp_fusion": False})
    assert len(compiled.asm["cubin"]) > 0
    assert "fma.rn.f32" not in compiled.asm["ptx"]
    # The keys are read ahead of the tensor cores that multiply them.
    is_attention = kernel is attending._attend
    assert ("mma.sync" in compiled.asm["ptx"]) == ("cp.async" in compiled.asm["ptx"]) == is_attention
