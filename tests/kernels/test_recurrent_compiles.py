"""The kernels over recurrent states compile for GPUs without a device, without fused rounding."""

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from betoken.kernels.linear_recurrence import kernel as recurring
from betoken.kernels.state_conv import kernel as convolving
from tests.products import covering

TARGETS = {name: GPUTarget("cuda", name, 32) for name in (80, 90, 100)}
HALVES = {"query", "key", "value", "waiting_keys", "waiting_values", "x", "ring", "weight", "bias", "given"}
FLOATS = {"rates", "gates", "waiting_gates", "states", "out"}
LAYER = {"KEY_HEADS": 16, "KEY_SIZE": 128, "HEADS": 32, "VALUE_SIZE": 128, "WAITING": 34, "BLOCK_D": 128, "BLOCK_E": 32}
DELTA = {"IS_DELTA": True, "NORMALIZES": True, "WEIGHS": True, "HAS_RATES": False}
PLAIN = DELTA | {"IS_DELTA": False, "NORMALIZES": False}
RATED = PLAIN | {"HAS_RATES": True, "GATES": 128}
CHANNELED = LAYER | {"KEY_HEADS": 1, "KEY_SIZE": 16, "HEADS": 64, "BLOCK_D": 16}
CHANNELS = {"NUM_CHANNELS": 8192, "RING": 37, "BLOCK": 512}
KERNELS = {
    "gated delta": (recurring._recur, LAYER | DELTA | {"GATES": 2, "HAS_TREES": True}),
    "kimi": (recurring._recur, LAYER | DELTA | {"GATES": 129, "HAS_TREES": False}),
    "mamba-2": (recurring._recur, LAYER | PLAIN | {"GATES": 2, "HAS_TREES": True}),
    "mamba": (recurring._recur, CHANNELED | RATED | {"WEIGHS": True, "HAS_TREES": True}),
    "lru": (recurring._recur, CHANNELED | RATED | {"KEY_SIZE": 1, "BLOCK_D": 1, "WEIGHS": False, "HAS_TREES": False}),
    "waiting": (recurring._store_waiting, {"WIDTH": 2048, "WAITING": 34, "BLOCK": 1024}),
    "convolution": (convolving._convolve, CHANNELS | {"NUM_TAPS": 4, "HAS_BIAS": True, "HAS_TREES": True}),
    "inputs": (convolving._store, CHANNELS),
}


def argument_type(name: str, kernel: Any) -> str:
    if name == "scale":
        return "fp32"
    if name == "states" and kernel is not recurring._recur:
        return "*i32"
    if name == "out" and kernel is convolving._convolve:
        return "*bf16"
    return "*bf16" if name in HALVES else "*fp32" if name in FLOATS else "*i32"


@pytest.mark.parametrize(("name", "target"), covering(KERNELS, TARGETS, strength=1))
def test_a_recurrent_kernel_compiles_for_gpus(
    name: str, target: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants = KERNELS[name]
    names = kernel.arg_names
    signature = {given: "constexpr" if given in constants else argument_type(given, kernel) for given in names}
    places = {(names.index(given),): value for given, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, given in enumerate(names) if signature[given].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": 4, "enable_fp_fusion": False})
    assert len(compiled.asm["cubin"]) > 0
    assert "fma.rn.f32" not in compiled.asm["ptx"]
