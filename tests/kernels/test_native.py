"""The native library's build: cached by content, refused from folders that others can write, optional."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from betoken.kernels import dispatch, native, noise
from betoken.kernels.build import build, find_compiler
from betoken.kernels.cpu import GROUPED_LIBRARY, LIBRARY, load_cpu_kernels

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="no C compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder and a library that is not loaded yet, whatever other tests of this process have loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_cache_dir", None)
    native._library.cache_clear()
    return tmp_path / "betoken"


@pytest.fixture(autouse=True)
def forget_the_test_library() -> object:
    yield
    native._library.cache_clear()


@needs_compiler
def test_the_native_library_is_compiled_once(fresh: Path) -> None:
    assert native.is_available()
    (built,) = fresh.glob("*.so")
    modified_ns = built.stat().st_mtime_ns
    native._library.cache_clear()
    assert native.is_available()
    assert [path.stat().st_mtime_ns for path in fresh.glob("*.so")] == [modified_ns]


@needs_compiler
def test_the_native_library_is_loaded_before_its_first_use_from_the_given_folder(fresh: Path, tmp_path: Path) -> None:
    native.load(tmp_path / "given")
    (built,) = (tmp_path / "given").glob("*.so")
    assert native.is_available() and not fresh.exists()
    assert str(built) == native._library()._name


@needs_compiler
def test_a_code_folder_that_others_can_write_is_not_used(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.mkdir()
    fresh.chmod(0o777)
    assert native.is_available()
    assert list(fresh.iterdir()) == []
    assert f"not kept in {fresh}" in caplog.text and "777" in caplog.text


@needs_compiler
def test_code_that_is_not_kept_is_gone_with_the_process(fresh: Path, tmp_path: Path) -> None:
    fresh.touch()  # no folder
    (tmp_path / "temporary").mkdir()
    code = "from betoken.kernels import native; assert native.is_available()"
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_working_compiler_the_reference_runs(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert not native.is_available()
    assert dispatch.select(torch.device("cpu"), noise.GUMBEL_IMPLEMENTATIONS)[0] == "reference"
    with pytest.raises(RuntimeError, match="compiler"):
        native.gumbel(torch.tensor([1]), torch.tensor([1]), 4, 0)


def test_with_a_compiler_every_native_library_is_built() -> None:
    """Other tests are skipped without the kernels: code that a compiler refuses must not look like a missing one."""
    for library in (native.LIBRARY, LIBRARY, GROUPED_LIBRARY):
        if sys.platform == "linux" and find_compiler(library) is not None:
            assert build(library).is_file(), library.name
    if sys.platform == "linux" and find_compiler(LIBRARY) is not None:
        kernels = load_cpu_kernels()
        assert kernels is not None
        kernels.load_grouped()
