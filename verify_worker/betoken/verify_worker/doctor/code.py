"""Compilers of the CPU kernels and the folder that keeps compiled code. It compiles nothing."""

import os
from pathlib import Path

from betoken.kernels.build import Library, find_compiler
from betoken.kernels.code_folder import ROOM_BYTES, unfit_reason, user_cache_dir
from betoken.verify_worker.doctor.finding import Finding, error, ok, warning


def compiler_finding(library: Library, is_required: bool) -> Finding:
    """Find the compiler of a library."""
    name = f"{library.compiler_variable} compiler"
    if (path := find_compiler(library)) is not None:
        return ok(name, path)
    variable = os.environ.get(library.compiler_variable)
    found = f"{library.compiler_variable} = {variable!r} names no program" if variable else "none"
    names = ", ".join(library.compilers)
    cure = f"install one of {names} (Debian: apt-get install g++), or set {library.compiler_variable}"
    level = error if is_required else warning  # without it torch computes, more slowly
    return level(name, found, cure)


def code_cache_finding(cache_dir: str | None) -> Finding:
    """Find out whether compiled code can be kept."""
    wanted = Path(cache_dir) if cache_dir else user_cache_dir()
    if not (reason := unfit_reason(wanted, ROOM_BYTES)):
        return ok("code cache", str(wanted))
    cure = f"name a folder of this user with mode 700 and {ROOM_BYTES >> 20} MiB free by --cache-dir"
    return warning("code cache", f"{wanted}: {reason}; each start compiles anew", cure)
