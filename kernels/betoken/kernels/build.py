"""Compiles the CPU kernels with the machine's own compiler, once, and keeps the libraries in the user's cache.

`BETOKEN_CPU_ISA=avx2` limits them to AVX2, so that tests run the code for older processors; the default is `native`.
A file name carries a hash of sources, compiler, flags, processor and torch, so that nothing stale is ever loaded.
It does not know what the kernels do.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from betoken.kernels.code_folder import (
    ROOM_BYTES,
    exclusive,
    private_folder,
    remove_all,
    remove_scratch,
    scratch_folder,
    user_cache_dir,
)
from betoken.kernels.file_trust import distrust

_LOG = logging.getLogger(__name__)
_COMMON_FLAGS = ("-O3", "-shared", "-fPIC")
_ISA_VARIABLE = "BETOKEN_CPU_ISA"
_ISA_FLAGS = {"native": "-march=native", "avx2": "-march=x86-64-v3"}
_TIMEOUT_S = 600

_compilers: set[subprocess.Popen[str]] = set()
"""Compilers that run now; a signal's handler reads it, too."""


class BuildError(Exception):
    """A library cannot be compiled here; the message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """The sources to compile."""

    name: str
    source: Path
    headers: tuple[Path, ...]
    """Files the source includes; their text counts for the hash."""
    compiler_variable: str
    """Environment variable that names the compiler: CC or CXX."""
    compilers: tuple[str, ...]
    """Looked for on the search path when the variable is not set."""
    flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    """Arguments after the source."""


def find_compiler(library: Library) -> str | None:
    """Path of the library's compiler, None when this machine has none."""
    given = os.environ.get(library.compiler_variable)
    names = (given,) if given else library.compilers
    return next((path for name in names if (path := shutil.which(name))), None)


def build(library: Library, cache_dir: Path | None = None) -> Path:
    """The shared library, compiled now unless the cache holds it, or another process that compiles it puts it there.

    Raises:
        BuildError: no compiler, or the compiler's own complaint.
        OSError: neither the cache nor the folder of temporary files takes it.
        ValueError: see `cpu_isa`.
    """
    compiler = find_compiler(library)
    if compiler is None:
        if given := os.environ.get(library.compiler_variable):
            raise BuildError(f"no compiler for {library.name}: {library.compiler_variable} names no program: {given!r}")
        names = ", ".join((library.compiler_variable, *library.compilers))
        raise BuildError(f"no compiler for {library.name} was found ({names})")
    wanted, name = cache_dir or user_cache_dir(), f"{library.name}-{_key(compiler, library)}.so"
    # A failure to add files does not matter then. Unlike Path's, isfile is False without read permission.
    if os.path.isfile(wanted / name) and not distrust(wanted) and not distrust(wanted / name):
        return wanted / name
    folder = private_folder(wanted, ROOM_BYTES)
    with exclusive(folder / f"{library.name}.lock") as is_alone:
        if is_alone:
            remove_scratch(folder, _scratch_prefix(library))
        if not (folder / name).is_file():
            _compile(compiler, library, folder / name)
    return folder / name


def give_up() -> None:
    """End the compilers that run and remove what they made: this process ends before its start is done."""
    for process in list(_compilers):
        process.terminate()
    remove_all()


def _key(compiler: str, library: Library) -> str:
    digest = hashlib.sha256()
    for source in (library.source, *library.headers):
        digest.update(source.read_bytes())
    for part in (_target(compiler), torch.__version__, *_common_flags(), *library.flags, *library.links):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def cpu_isa() -> str:
    """Return the instruction set that kernels are compiled for: `native` or `avx2`.

    Raises:
        ValueError: `BETOKEN_CPU_ISA` has another value.
    """
    isa = os.environ.get(_ISA_VARIABLE) or "native"
    if isa not in _ISA_FLAGS:
        raise ValueError(f"{_ISA_VARIABLE}: {isa!r} is not one of {', '.join(_ISA_FLAGS)}")
    return isa


def _common_flags() -> tuple[str, ...]:
    return _ISA_FLAGS[cpu_isa()], *_COMMON_FLAGS


def native_target(library: Library) -> str:
    """Return the target that the library's compiler selects for `cpu_isa()`; empty without a compiler."""
    compiler = find_compiler(library)
    return "" if compiler is None else _target(compiler)


def _target(compiler: str) -> str:
    # GCC's list, and the macros by which code asks for instructions, since clang has no list.
    questions = (("-Q", "--help=target"), ("-dM", "-E", "-x", "c", os.devnull))
    native = [_output([compiler, _ISA_FLAGS[cpu_isa()], *question], allow_failure=True) for question in questions]
    return "\0".join((platform.machine(), _output([compiler, "--version"]), *native))


def _compile(compiler: str, library: Library, path: Path) -> None:
    """Compile in a sibling folder, then rename atomically: readers without the lock find the whole file or none."""
    with scratch_folder(path.parent, _scratch_prefix(library)) as scratch:
        made = scratch / path.name
        _LOG.info("compiling %s: %s", library.name, path)
        command = [compiler, *_common_flags(), *library.flags, str(library.source), "-o", str(made), *library.links]
        _output(command, environment=os.environ | {"TMPDIR": str(scratch)})
        with made.open("rb") as file:
            os.fsync(file.fileno())  # or a loss of power may leave the name of a file and not what is in it, for good
        made.replace(path)


def _scratch_prefix(library: Library) -> str:
    return f"building-{library.name}-"


def _output(
    command: Sequence[str], *, allow_failure: bool = False, environment: Mapping[str, str] | None = None
) -> str:
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
        )
        _compilers.add(process)
        with process:
            try:
                output, errors = process.communicate(timeout=_TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
            finally:
                _compilers.discard(process)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if process.returncode and not allow_failure:
        raise BuildError(f"{command[0]} failed: {errors.strip()[-2000:]}")
    return output
