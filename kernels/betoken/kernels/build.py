"""Compiles the CPU kernels with the machine's own compiler, once, and keeps the libraries in the user's cache.

A file name carries a hash of sources, compiler, flags, processor and torch, so that nothing stale is ever loaded.
It does not know what the kernels do.
"""

import atexit
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)
_COMMON_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_TIMEOUT_S = 600


class BuildError(Exception):
    """A library cannot be compiled here; the message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """What to compile."""

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


def user_cache_dir() -> Path:
    """Where this user's caches lie: XDG_CACHE_HOME or the platform's default, then `betoken`; in the folder of
    temporary files for a user who has no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "betoken"
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the system knows the user by a number only
        return Path(tempfile.gettempdir()) / f"betoken-{os.getuid()}"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "betoken"


def find_compiler(library: Library) -> str | None:
    """Path of the library's compiler, None when this machine has none."""
    given = os.environ.get(library.compiler_variable)
    names = (given,) if given else library.compilers
    return next((path for name in names if (path := shutil.which(name))), None)


def build(library: Library, cache_dir: Path | None = None) -> Path:
    """The shared library, compiled now unless the cache holds it.

    Raises:
        BuildError: no compiler, or the compiler's own complaint.
    """
    compiler = find_compiler(library)
    if compiler is None:
        if given := os.environ.get(library.compiler_variable):
            raise BuildError(f"no compiler for {library.name}: {library.compiler_variable} names no program: {given!r}")
        names = ", ".join((library.compiler_variable, *library.compilers))
        raise BuildError(f"no compiler for {library.name} was found ({names})")
    wanted, name = cache_dir or user_cache_dir(), f"{library.name}-{_key(compiler, library)}.so"
    # That nothing can be added does not matter then. Unlike Path's, isfile is False where one may not look.
    if os.path.isfile(wanted / name) and _is_private(wanted):
        return wanted / name
    path = private_folder(wanted) / name
    if not path.is_file():
        _compile(compiler, library, path)
    return path


def private_folder(wanted: Path) -> Path:
    """`wanted` if it is this user's alone, else a temporary one: loading code that others can write would be a hole."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(wanted):
            mode = wanted.stat().st_mode & 0o7777
            reason = f"it must be this user's and writable by nobody else, its mode is {mode:o}"
        elif not os.access(wanted, os.W_OK):
            reason = "it cannot be written"
        else:
            return wanted
    except OSError as error:
        reason = str(error)
    _LOG.warning("compiled code is not kept in %s: %s", wanted, reason)
    temporary = tempfile.mkdtemp(prefix="betoken-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _is_private(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _key(compiler: str, library: Library) -> str:
    digest = hashlib.sha256()
    for source in (library.source, *library.headers):
        digest.update(source.read_bytes())
    for part in (_target(compiler), torch.__version__, *_COMMON_FLAGS, *library.flags, *library.links):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def native_target(library: Library) -> str:
    """Tells apart what the library's compiler makes of -march=native; empty without a compiler."""
    compiler = find_compiler(library)
    return "" if compiler is None else _target(compiler)


def _target(compiler: str) -> str:
    # What GCC lists, and the macros by which code asks for instructions: clang has no list.
    questions = (("-Q", "--help=target"), ("-dM", "-E", "-x", "c", os.devnull))
    native = [_output([compiler, "-march=native", *question], allow_failure=True) for question in questions]
    return "\0".join((platform.machine(), _output([compiler, "--version"]), *native))


def _compile(compiler: str, library: Library, path: Path) -> None:
    """Into a temporary file, then an atomic rename: two processes may build at once."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
        made = Path(scratch) / path.name
        _LOG.info("compiling %s: %s", library.name, path)
        _output([compiler, *_COMMON_FLAGS, *library.flags, str(library.source), "-o", str(made), *library.links])
        with made.open("rb") as file:
            os.fsync(file.fileno())  # or a loss of power may leave the name of a file and not what is in it, for good
        made.replace(path)


def _output(command: Sequence[str], *, allow_failure: bool = False) -> str:
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode and not allow_failure:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
