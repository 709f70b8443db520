"""Compile the C++ kernels once per machine and keep the library in a cache directory.

The file name carries a hash of the sources, the compiler, the processor's features and torch, so that nothing stale is
ever loaded. It does not know what the kernels do.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-Wno-psabi", "-pthread")
_TIMEOUT_S = 600


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def user_cache_dir() -> Path:
    """Where this user's caches lie: XDG_CACHE_HOME or the platform's default, then `foretoken`."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "foretoken"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "foretoken"


def find_compiler() -> str | None:
    """Path of the C++ compiler: CXX if set, else g++ or c++ of the search path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def build_library(cache_dir: Path | None) -> Path:
    """The shared library, compiled now unless the cache holds it.

    Raises:
        BuildError: no compiler, no Linux, or the compiler's own complaint.
    """
    if sys.platform != "linux":
        raise BuildError(f"the kernels are written for Linux, this is {sys.platform}")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (CXX, g++, c++) was found")
    sources = sorted(Path(__file__).parent.glob("*.h")) + [Path(__file__).parent / "ops.cpp"]
    library = (cache_dir or user_cache_dir()) / "cpu" / f"foretoken-{_key(compiler, sources)}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, sources[-1], library)
    return library


def _key(compiler: str, sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    target = _output([compiler, "-march=native", "-Q", "--help=target"], allow_failure=True)
    for part in (_output([compiler, "--version"]), target, torch.__version__, platform.machine(), *_FLAGS):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Into a temporary file, then an atomic rename: two processes may build at once."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *_FLAGS, f"-isystem{root / 'include'}", str(source), "-o", str(made)]
        command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _LOG.info("compiling the CPU kernels: %s", library)
        _output(command)
        made.replace(library)


def _output(command: list[str], *, allow_failure: bool = False) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode and not allow_failure:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
