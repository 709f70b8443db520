"""Folders that are written whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder next to `target` to write into, renamed to it at the end.

    What raises leaves nothing behind; what is killed leaves a folder named after it that ends in `.part`.

    Raises:
        FileExistsError: `target` is there.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
