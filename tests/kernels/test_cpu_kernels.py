"""The compiled CPU kernels: packed products against torch, row by row; the build and its absence."""

import dataclasses
import os
import pwd
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from betoken.kernels import build, code_folder, cpu
from betoken.kernels.cpu import CpuKernels, load_cpu_kernels


@pytest.fixture(scope="module", params=[1, 2, 3])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None:
        pytest.skip("no compiler: the CPU kernels cannot be built here")
    loaded.set_num_threads(request.param)
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(640, 384), (64, 32), (101, 50), (1, 3), (33, 257)])
def test_packed_cpu_products_equal_torchs_and_per_row(
    kernels: CpuKernels, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    x = torch.randn(70, num_inputs, generator=generator).to(dtype)
    packed = torch.ops.betoken.pack_linear(weight)
    for given in (bias, None):
        out = torch.ops.betoken.linear(x, packed, given, num_outputs)
        expected = x.double() @ weight.double().T + (0 if given is None else given.double())
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()
        sums = torch.ops.betoken.linear_sums(x, packed, given, num_outputs)
        assert sums.dtype == torch.float32 and torch.equal(sums.to(dtype), out)
        assert (sums.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
        for num_rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64):
            assert torch.equal(torch.ops.betoken.linear_sums(x[:num_rows], packed, given, num_outputs), sums[:num_rows])
            assert torch.equal(torch.ops.betoken.linear(x[:num_rows], packed, given, num_outputs), out[:num_rows])
            assert torch.equal(torch.ops.betoken.linear(x[-num_rows:], packed, given, num_outputs), out[-num_rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_over_no_terms_is_the_bias(kernels: CpuKernels, dtype: torch.dtype, has_bias: bool) -> None:
    """As in a model whose configuration asks for no shared experts: its layers are there, of width 0."""
    bias = torch.arange(5, dtype=dtype) if has_bias else None
    packed = torch.ops.betoken.pack_linear(torch.empty(5, 0, dtype=dtype))
    out = torch.ops.betoken.linear(torch.empty(1, 7, 0, dtype=dtype), packed, bias, 5)
    assert torch.equal(
        out, torch.nn.functional.linear(torch.empty(1, 7, 0, dtype=dtype), torch.empty(5, 0, dtype=dtype), bias)
    )
    packed = torch.ops.betoken.pack_linear(torch.empty(0, 5, dtype=dtype))
    assert torch.ops.betoken.linear(torch.empty(1, 7, 5, dtype=dtype), packed, None, 0).shape == (1, 7, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_goes_through_its_own_expert(kernels: CpuKernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(5, 48, 40, generator=generator).to(dtype)
    bias = torch.randn(5, 48, generator=generator).to(dtype)
    x = torch.randn(23, 40, generator=generator).to(dtype)
    expert_ids = torch.randint(0, 5, (23,), generator=generator)
    packed = torch.stack([torch.ops.betoken.pack_linear(weight) for weight in weights])
    out = torch.ops.betoken.expert_linear(x, packed, bias, expert_ids, 48)
    for row, expert in enumerate(expert_ids.tolist()):
        alone = torch.ops.betoken.linear(x[row : row + 1], packed[expert], bias[expert], 48)
        assert torch.equal(out[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_value_that_is_not_finite_reaches_only_rows_that_see_it(kernels: CpuKernels, dtype: torch.dtype) -> None:
    num_rows = 9
    layout = np.array([*range(num_rows), *[0] * num_rows, 0, 1, 0], np.int32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(num_rows, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2))
    results = []
    for number in (0.0, torch.nan):
        value[5, 0, 3] += number
        caches = [{0: torch.zeros(2, 16, 2, 64, dtype=dtype)} for _ in range(2)]
        cache = kernels.create_cache(*caches)
        cache.begin_step(layout, num_rows, 1)
        results.append(torch.ops.betoken.attend(query, key, value, 0, 0.125, 0, 0.0, None, 0, None))
    sound, sick = results
    assert torch.equal(sick[:5], sound[:5]) and torch.equal(sick[:, 2:], sound[:, 2:])
    assert sick[5:, :2].isnan().all(), "query heads 0 and 1 share key head 0"


@pytest.mark.parametrize(
    ("heads", "sizes", "dtype", "complaint"),
    [
        ((4, 2, 2), (64, 64, 64), torch.float32, "attention in Float over keys and values in BFloat16"),
        ((4, 4, 2), (64, 64, 64), torch.bfloat16, r"keys \[3, 4, 64\] do not fit the cache"),
        ((4, 2, 2), (64, 64, 80), torch.bfloat16, r"values \[3, 2, 80\] do not fit the cache"),
        ((3, 2, 2), (64, 64, 64), torch.bfloat16, r"queries \[3, 3, 64\] do not fit the keys"),
        ((4, 2, 2), (96, 64, 64), torch.bfloat16, r"queries \[3, 4, 96\] do not fit the keys"),
    ],
)
def test_keys_that_do_not_fit_the_cache_are_not_written_beyond_it(
    kernels: CpuKernels, heads: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype, complaint: str
) -> None:
    memory = torch.zeros(2, 3 * 16, 2, 64, dtype=torch.bfloat16)  # a page, and room on either side of it
    keys, values = ({0: part[16:32].unsqueeze(0)} for part in memory)
    query, key, value = (torch.ones(3, *shape, dtype=dtype) for shape in zip(heads, sizes, strict=True))
    cache = kernels.create_cache(keys, values)
    layout = np.array([13, 14, 15, 0, 0, 0, 0, 1, 0], np.int32)
    cache.begin_step(layout, 3, 1)
    with pytest.raises(RuntimeError, match=complaint):
        torch.ops.betoken.attend(query, key, value, 0, 0.125, 0, 0.0, None, 0, None)
    assert not memory.any()


def test_experts_of_another_type_are_not_read_beyond_their_end(kernels: CpuKernels) -> None:
    packed = torch.ops.betoken.pack_linear(torch.ones(64, 32, dtype=torch.bfloat16))[None]
    with pytest.raises(RuntimeError, match="differ in type"):
        torch.ops.betoken.expert_linear(torch.ones(2, 32), packed, None, torch.zeros(2, dtype=torch.int64), 64)


def test_the_kernel_library_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def compile_nothing(compiler: str, library: build.Library, path: Path) -> None:
        compiled.append(path)
        path.write_bytes(b"")

    if build.find_compiler(cpu.LIBRARY) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(build, "_compile", compile_nothing)
    assert build.build(cpu.LIBRARY, tmp_path) == build.build(cpu.LIBRARY, tmp_path) == compiled[0]
    assert len(compiled) == 1 and compiled[0].is_relative_to(tmp_path)


def test_a_read_only_kernel_cache_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Like a cache filled when an image was built, on a read-only root."""
    if build.find_compiler(cpu.LIBRARY) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(build, "_compile", lambda compiler, library, path: path.touch())
    kept = build.build(cpu.LIBRARY, tmp_path)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    assert build.build(cpu.LIBRARY, tmp_path) == kept and not caplog.records
    kept.unlink()
    assert not build.build(cpu.LIBRARY, tmp_path).is_relative_to(tmp_path) and "cannot be written" in caplog.text


def test_a_library_that_others_can_replace_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build.find_compiler(cpu.LIBRARY) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(build, "_compile", lambda compiler, library, path: path.touch())
    kept = build.build(cpu.LIBRARY, tmp_path)
    tmp_path.chmod(0o777)
    assert build.build(cpu.LIBRARY, tmp_path) != kept


@pytest.mark.parametrize("part", ["common flags", "flags", "links", "torch"])
def test_a_library_made_otherwise_is_another(part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after an upgrade that changes how it is made and no source."""
    if build.find_compiler(cpu.LIBRARY) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(build, "_compile", lambda compiler, library, path: path.touch())
    before, library = build.build(cpu.LIBRARY, tmp_path), cpu.LIBRARY
    if part == "common flags":
        monkeypatch.setattr(build, "_COMMON_FLAGS", (*build._COMMON_FLAGS, "-ffp-contract=off"))
    elif part == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        library = dataclasses.replace(library, **{part: ("-lm",)})
    assert build.build(library, tmp_path) != before


def test_without_a_compiler_the_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "_loaded", None)
    monkeypatch.setattr(cpu, "_failure", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_cpu_kernels(tmp_path) is None and load_cpu_kernels(tmp_path) is None
    assert [record for record in caplog.records if "no compiler" in record.getMessage()] == caplog.records


def test_a_compiler_with_arguments_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "ccache g++")
    with pytest.raises(build.BuildError, match=r"CXX names no program: 'ccache g\+\+'"):
        build.build(cpu.LIBRARY, tmp_path)


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\nprintf 'it is raining \\351\\n' >&2\nexit 1\n")  # not UTF-8
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match="raining"):
        build.build(cpu.LIBRARY, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.so"))


def test_a_library_of_clang_for_one_processor_is_not_used_on_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Machines that share a cache may differ in their processors alone."""
    clang = tmp_path / "clang++"
    clang.write_text(
        "#!/bin/sh\n"
        'case "$*" in *help=target*) echo "unknown argument: -Q" >&2; exit 1;;\n'
        '*-march=native*-dM*) echo "#define $PROCESSOR 1";;\n'
        "*--version) echo clang version 19.1.7;; esac\n"
    )
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    monkeypatch.delenv("BETOKEN_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "_compile", lambda compiler, library, path: path.touch())
    paths = set()
    for processor in ("__AVX512F__", "__AVX2__"):
        monkeypatch.setenv("PROCESSOR", processor)
        paths.add(build.build(cpu.LIBRARY, tmp_path / "cache"))
    assert len(paths) == 2


@pytest.mark.parametrize(("isa", "flag"), [(None, "native"), ("native", "native"), ("avx2", "x86-64-v3")])
def test_kernels_are_compiled_for_the_instruction_set_of_the_environment(
    isa: str | None, flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor made; do case "$last" in -o) echo "$*" > "$made";; esac; last=$made; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BETOKEN_CPU_ISA", isa or "")
    words = build.build(cpu.LIBRARY, tmp_path / "cache").read_text().split()
    assert [word for word in words if word.startswith("-march")] == [f"-march={flag}"]


def test_a_library_for_another_instruction_set_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build.find_compiler(cpu.LIBRARY) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(build, "_compile", lambda compiler, library, path: path.touch())
    monkeypatch.setenv("BETOKEN_CPU_ISA", "native")
    native, target = build.build(cpu.LIBRARY, tmp_path), build.native_target(cpu.LIBRARY)
    monkeypatch.setenv("BETOKEN_CPU_ISA", "avx2")
    assert build.build(cpu.LIBRARY, tmp_path) != native and build.native_target(cpu.LIBRARY) != target
    assert "__AVX512F__" not in build.native_target(cpu.LIBRARY)


def test_an_unknown_instruction_set_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BETOKEN_CPU_ISA", "avx3")
    with pytest.raises(ValueError, match="BETOKEN_CPU_ISA: 'avx3' is not one of native, avx2"):
        build.build(cpu.LIBRARY, tmp_path)


def test_a_library_is_on_the_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor made; do case "$last" in -o) echo made > "$made";; esac; last=$made; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    named: list[list[Path]] = []
    monkeypatch.setattr(os, "fsync", lambda _: named.append(list((tmp_path / "cache").glob("*.so"))))
    assert build.build(cpu.LIBRARY, tmp_path / "cache").read_text() == "made\n"
    assert named == [[]]


def test_the_cache_lies_where_the_platform_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert code_folder.user_cache_dir() == tmp_path / "betoken"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert code_folder.user_cache_dir().name == "betoken" and Path.home() in code_folder.user_cache_dir().parents


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user may be a number only, and a supervisor need not set HOME."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = code_folder.private_folder(code_folder.user_cache_dir())
    assert folder.parent == tmp_path and code_folder.private_folder(code_folder.user_cache_dir()) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
