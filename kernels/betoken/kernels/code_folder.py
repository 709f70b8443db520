"""Folders for compiled code: the user's cache if it is safe and has room, else a temporary one.

Only one of several processes compiles, and a process that ends early leaves no files behind. It does not know what
is compiled.
"""

import atexit
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from betoken.kernels.file_trust import distrust, foreign_entry

_LOG = logging.getLogger(__name__)
ROOM_BYTES = 32 << 20
"""Free bytes that a folder needs to take new code: several times what one model makes."""

_REMOVAL_TRIES, _REMOVAL_PAUSE_S = 50, 0.02
"""Removals of one folder at the end, and the pause between them: a compiler under way may still write to it."""

_made: set[Path] = set()
"""Folders that end with this process, by name from before they exist. No lock: a signal's handler reads it too."""
_temporary: Path | None = None
_is_ending = False


class EndingError(OSError):
    """This process ends, so no further folder is made."""


def user_cache_dir() -> Path:
    """The folder of this user's caches: XDG_CACHE_HOME or the platform's default, then `betoken`; in the folder of
    temporary files for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "betoken"
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the system knows the user by a number only
        return Path(tempfile.gettempdir()) / f"betoken-{os.getuid()}"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "betoken"


def private_folder(wanted: Path, room_bytes: int = 0) -> Path:
    """Return `wanted` if other users cannot replace its content and it takes `room_bytes` more, else a temporary
    folder, the same for all calls.

    Code that other users can write is never loaded.
    """
    global _temporary
    if not (reason := unfit_reason(wanted, room_bytes)):
        return wanted
    _LOG.warning("compiled code is not kept in %s: %s", wanted, reason)
    if _temporary is None:
        _temporary = _make(Path(tempfile.gettempdir()), "betoken-")
    return _temporary


def unfit_reason(wanted: Path, room_bytes: int = 0) -> str:
    """Why `private_folder` would not return the folder, which is made; empty = it would."""
    try:
        return _unfit(wanted, room_bytes)
    except OSError as error:
        return str(error)


def _unfit(wanted: Path, room_bytes: int) -> str:
    wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust(wanted):
        return reason
    if (entry := foreign_entry(wanted)) is not None:
        return f"{entry} belongs to another user"
    if not os.access(wanted, os.W_OK):
        return "it cannot be written"
    if room_bytes and hasattr(os, "posix_fallocate"):
        with tempfile.TemporaryFile(dir=wanted) as probe:
            os.posix_fallocate(probe.fileno(), 0, room_bytes)
    return ""


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in `parent` for the block, removed even if the process ends early."""
    folder = _make(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _made.discard(folder)


def _make(parent: Path, prefix: str) -> Path:
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    _made.add(folder)
    if _is_ending:
        raise EndingError("this process ends")
    folder.mkdir(mode=0o700)
    return folder


def remove_scratch(parent: Path, prefix: str) -> None:
    """Removes what processes left that were killed; the caller holds the lock under which such folders are made."""
    for folder in parent.glob(f"{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def exclusive(lock: Path) -> Iterator[bool]:
    """Hold the lock of this file, which stays, for the block: other processes, and threads, wait.

    Yields False if the file system does not support locks.
    """
    import fcntl  # unavailable on Windows, which compiles no code

    with lock.open("ab") as file:
        is_held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.info("waiting for another process that compiles: %s", lock)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            is_held = False
        yield is_held


def remove_all() -> None:
    """Remove what this process made and would take with it; from here on it makes nothing."""
    global _is_ending
    _is_ending = True
    for folder in list(_made):
        for _ in range(_REMOVAL_TRIES):
            with suppress(OSError):
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_REMOVAL_PAUSE_S)


atexit.register(remove_all)
