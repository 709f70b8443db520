"""GGUF files of the hub, named by repository and quantisation: `OWNER/NAME:Q4_K_M`, or by repository and file.

They are loaded from the local hub cache, and downloaded if the hub can be reached.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from betoken.common.gguf.header import GgufError
from betoken.common.gguf.parts import SUFFIX, whole_name
from betoken.common.model_path import split_hub_file

_MAX_NAMES = 24
"""File names listed by an error."""


def fetch_hub_file(model: str, revision: str | None, **options: Any) -> Path:
    """Return the file that `OWNER/NAME:FILE` names; of a file in parts the first one.

    Args:
        options: further ones of `huggingface_hub.snapshot_download`.

    Raises:
        GgufError: no file of the repository matches, or several do; the error lists them.
        Exception: the repository is neither in the cache nor can it be fetched; the hub client has many types.
    """
    from huggingface_hub import snapshot_download  # of the services, which the SDK lacks

    named = split_hub_file(model)
    if named is None:
        raise GgufError(f"{model} does not name a file of the hub: OWNER/NAME:FILE")
    repository, wanted = named
    parts = choose_file(_files_of(repository, revision), wanted, repository)
    patterns = [glob.escape(part) for part in parts]
    path = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, **options)) / parts[0]
    if not path.is_file():
        raise GgufError(f"{model}: {parts[0]} is not in the hub cache, and the hub cannot be reached")
    return path


def choose_file(files: Sequence[str], wanted: str, repository: str) -> list[str]:
    """Return the paths among `files` that `wanted` means: a path itself, or the quantisation in its name (in any case).

    More than one are the parts of one file, in order.

    Raises:
        GgufError: none or several match.
    """
    models = sorted(file for file in files if file.endswith(SUFFIX) and not _name(file).startswith("mmproj"))
    if wanted in models:
        stem = whole_name(wanted)
    else:
        part_of_name = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?=[.-])", re.IGNORECASE)
        stems = sorted({whole_name(file) for file in models if part_of_name.search(_name(file))})
        if len(stems) != 1:
            found = f"several files match: {_listed(stems)}"
            if not stems:
                found = f"no such GGUF file; it has {_listed(models)}"
            raise GgufError(f"{repository}:{wanted}: {found}")
        stem = stems[0]
    return [file for file in models if whole_name(file) == stem]


def _files_of(repository: str, revision: str | None) -> list[str]:
    """Paths of a repository's files, from the hub; of the cached ones if it cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return HfApi().list_repo_files(repository, revision=revision)
    except Exception as error:  # the hub client raises many types: network, authentication, validation
        try:
            # Without patterns a cache that lacks some of the repository's files would be rejected.
            snapshot = Path(snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=[]))
        except Exception:
            raise error from None
        return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob(f"*{SUFFIX}")]


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _listed(files: Sequence[str]) -> str:
    names = ", ".join(files[:_MAX_NAMES])
    return f"{names}, ..." if len(files) > _MAX_NAMES else names or "none"
