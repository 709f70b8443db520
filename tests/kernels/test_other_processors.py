"""The CPU kernels for other processors: compiled with fewer instruction sets, in a separate process."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from betoken.kernels.cpu import LIBRARY, load_cpu_kernels

KERNELS = """
#include "attention.h"
#include "int8_linear.h"
#include "linear.h"
#include "linear_grouped.h"
#include "linear_recurrence.h"
#include "state_conv.h"
template void betoken::attention(const betoken::Attention<betoken::bf16>&);
template void betoken::attention(const betoken::Attention<float>&);
template void betoken::linear(betoken::Linear<betoken::bf16>);
template void betoken::linear(betoken::Linear<float>);
template void betoken::linear_grouped(betoken::GroupedLinear<betoken::bf16>);
template void betoken::linear_grouped(betoken::GroupedLinear<float>);
template void betoken::linear_int8(const betoken::GroupedLinear<betoken::bf16>&);
template void betoken::linear_int8(const betoken::GroupedLinear<float>&);
template void betoken::linear_recurrence(const betoken::Recurrence<betoken::bf16>&);
template void betoken::linear_recurrence(const betoken::Recurrence<float>&);
template void betoken::state_conv(const betoken::StateConv<betoken::bf16>&);
template void betoken::state_conv(const betoken::StateConv<float>&);
"""
ROOT = Path(__file__).parents[2]
TESTS = (
    "test_cpu_kernels.py",
    "test_linear_grouped.py",
    "test_linear_int8.py",
    "test_attention.py",
    "test_tree_attention.py",
    "test_linear_recurrence.py",
    "test_state_conv.py",
)

# Swaps the library's flags before anything loads it, then runs the tests of products and attention on it.
CHILD = """
import dataclasses, sys
import pytest
from betoken.kernels import cpu
flags, products, tests = sys.argv[1].split(), sys.argv[2], sys.argv[3:]
for name in ("LIBRARY", "GROUPED_LIBRARY", "INT8_LIBRARY", "RECURRENT_LIBRARY"):
    library = getattr(cpu, name)
    setattr(cpu, name, dataclasses.replace(library, flags=(*library.flags, *flags)))
kernels = cpu.load_cpu_kernels()
assert kernels is not None and kernels.products == products, kernels and kernels.products
which = "product or packed_rows or definition or path_as_a_chain or few_queries"
which += " or (is_cut or random_results or own_sum) and native"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", which, *tests]))
"""


@pytest.mark.parametrize(
    ("flags", "products"),
    [
        pytest.param("-march=x86-64-v3", "vector", id="avx2", marks=pytest.mark.slow),  # `make test-avx2` runs all
        pytest.param("-march=skylake-avx512", "vector", id="avx512"),
        pytest.param("-mno-amx-bf16 -mno-amx-tile -DBETOKEN_DOTS=true", "dot", id="avx512-bf16"),
    ],
)
def test_kernels_are_right_with_fewer_instruction_sets(flags: str, products: str) -> None:
    native = load_cpu_kernels()
    if platform.machine() != "x86_64" or native is None:
        pytest.skip("other x86 processors need a compiler on an x86 machine")
    processor = Path("/proc/cpuinfo").read_text()
    if products == "dot" and ("avx512_bf16" not in processor or native.products == "dot"):
        pytest.skip("this processor has no AVX512-BF16, or all other tests run on it")
    if "avx512" in flags and ("avx512vl" not in processor or "avx512_bf16" not in processor):
        pytest.skip("this processor has no AVX512, or nothing beyond it: all other tests run on it")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, flags, products, *(str(ROOT / "tests/kernels" / name) for name in TESTS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("processor", ["sapphirerapids", "cooperlake", "x86-64-v3", "x86-64"])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_every_compiler_takes_the_code_for_every_processor(compiler: str, processor: str, tmp_path: Path) -> None:
    """The code for tiles too, which few machines can run."""
    if platform.machine() != "x86_64" or shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} for x86")
    nothing = [compiler, f"-march={processor}", "-E", "-x", "c++", os.devnull]
    if subprocess.run(nothing, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"a {compiler} that does not know the {processor}")
    source = tmp_path / "kernels.cpp"
    source.write_text(KERNELS)
    command = [compiler, f"-march={processor}", "-std=c++20", "-fsyntax-only", f"-I{LIBRARY.source.parent}"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
