"""Whether other users could replace a file: owners and modes of the file, its folders and the links on the way.

Root is trusted. Access control lists are not read.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_ROOT = 0
_MAX_LINKS = 40


def distrust(path: Path) -> str:
    """Return why other users could replace what is at `path`; empty if only this user and root can.

    A folder on the way may be sticky, as /tmp is: then its entries belong to their owners.

    Raises:
        OSError: it cannot be looked at.
    """
    for entry in _entries(path):
        status = entry.lstat()
        if status.st_uid not in (os.getuid(), _ROOT):
            return f"{entry} belongs to user {status.st_uid}"
        is_shared = _others_may_write(status) and not status.st_mode & stat.S_ISVTX
        if is_shared and not stat.S_ISLNK(status.st_mode):
            return f"other users may write {entry}, its mode is {status.st_mode & 0o7777:o}"
    return _distrust_of_owner(path)


def _distrust_of_owner(path: Path) -> str:
    """The last entry has to be this user's, and a sticky folder is not enough."""
    status = path.stat()
    if status.st_uid != os.getuid():
        return f"{path} belongs to user {status.st_uid}"
    return f"other users may write {path}, its mode is {status.st_mode & 0o7777:o}" if _others_may_write(status) else ""


def foreign_entry(folder: Path) -> Path | None:
    """Return an entry anywhere below the folder that belongs to another user and not to root; None if there is none."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entry = Path(parent, name)
            if os.lstat(entry).st_uid not in (os.getuid(), _ROOT):
                return entry
    return None


def _entries(path: Path) -> Iterator[Path]:
    """Every folder, link and file that the system visits to find `path`, from the root on."""
    pending = [*reversed(Path(os.path.abspath(path)).parts[1:])]
    current, num_links = Path("/"), 0
    yield current
    while pending:
        name = pending.pop()
        current = current.parent if name == ".." else current / name
        yield current
        if name == ".." or not current.is_symlink():
            continue
        if (num_links := num_links + 1) > _MAX_LINKS:
            raise OSError(f"{path}: more than {_MAX_LINKS} symbolic links")
        target = Path(os.readlink(current))
        pending += [*reversed(target.parts[1:] if target.is_absolute() else target.parts)]
        current = Path("/") if target.is_absolute() else current.parent


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(group_id: int) -> bool:
    """Whether the group is the user's private one, as systems with a umask of 002 make one for every user."""
    import grp  # unavailable on Windows
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
