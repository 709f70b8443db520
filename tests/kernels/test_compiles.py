"""The kernels of logits compile for a GPU without a device: the compiler may reject what the interpreter accepts."""

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from betoken.kernels import weights_kernel
from betoken.kernels.logits_adjust import kernel as adjusting
from betoken.kernels.noise import kernel as noise
from betoken.kernels.rejection import kernel as rejecting
from betoken.kernels.sample import kernel as sampling
from betoken.kernels.sample import logprobs_kernel, narrowing
from betoken.kernels.triton_math import EXACT
from betoken.kernels.typical import kernel as typical
from tests.products import covering

HOPPER = GPUTarget("cuda", 90, 32)
INTEGERS = {"vocab_size", "num_groups", "num_chunks", "num_splits", "num_top", "num_rows", "num_entries", "num_words"}
INTEGERS |= {"num_halvings"}
INT32 = {"top_k", "groups", "counts", "allowed"}
INT64 = {"seeds", "positions", "row_offsets", "token_ids", "top_ids"}
WEIGHTS = {"floors": "*i64", "likeliest": "*i32", "totals": "*i64", "spreads": "*i64"}
CHAINS = dict.fromkeys(
    ("target_ids", "draft_ids", "offsets", "prob_offsets", "prob_ids", "num_accepted", "next_ids"), "*i64"
)
MOST_LINES = 15_000
"""Lines of code for the device, before it is assembled: more takes the compiler many seconds."""
# kernel, constants, types that differ from the above
CASES = [
    (noise._gumbel, {"CALLS": 256}, {"stream": "i32"}),
    (adjusting._adjust, {"BLOCK": 256}, {"ids": "*i64"}),
    (adjusting._mask, {"BLOCK": 4096}, {}),
    (narrowing._scan, {"TILES": 4}, {}),
    (narrowing._narrow, {"KEEPS_TOP_K": False, "GROUPS": 2048, "CHUNKS": 32}, {}),
    (sampling._draw, {"GROUPS": 16}, {"ids": "*i32"}),
    (sampling._decide, {"GROUPS": 32, "SPLITS": 64}, {"ids": "*i32", "out": "*i64"}),
    (logprobs_kernel._rank, {"GROUPS": 32}, {}),
    (weights_kernel._row_weights, {"BLOCK": 1024}, WEIGHTS),
    (rejecting._reject, {"CALLS": 256, "PROBS": 64}, WEIGHTS | CHAINS),
    (typical._typical, {}, WEIGHTS | CHAINS | {"rows": "*i64", "is_accepted": "*i32", "weights": "*i64"}),
]
KERNELS: dict[str, Any] = {kernel.__name__: (kernel, *rest) for kernel, *rest in CASES}


def argument_type(name: str, types: dict[str, str], logits_type: str) -> str:
    if name in types:
        return types[name]
    if name in INTEGERS:
        return "i32"
    if name in ("logits", "maxima"):
        return f"*{logits_type}"
    return "*i32" if name in INT32 else "*i64" if name in INT64 else "*fp32"


@pytest.mark.parametrize(("name", "logits_type"), covering(KERNELS, ["bf16", "fp16", "fp32"], strength=1))
def test_a_logits_kernel_compiles_for_gpus(
    name: str, logits_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel, constants, types = KERNELS[name]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name, types, logits_type) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, **EXACT})
    assert len(compiled.asm["cubin"]) > 0
    assert "fma.rn.f32" not in compiled.asm["ptx"]  # would round once, the references round twice
    assert compiled.asm["ptx"].count("\n") < MOST_LINES
