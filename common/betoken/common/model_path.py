"""Names of models: a directory or GGUF file of this machine, or an id or GGUF file of the hub. It reads no contents."""

import os
import re
from pathlib import Path

_SUFFIX = ".gguf"
_REMEDY = "name a directory, a GGUF file, or a hub id such as OWNER/NAME or OWNER/NAME:Q4_K_M"
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+):([^:]+)")


def path_fault(model: str) -> str:
    """Return why the name is a path that means no model, and what to do; empty for a directory, a GGUF file, and for a
    name that may be a hub id."""
    path = Path(os.path.expanduser(model))  # leaves the home of an unknown user alone, unlike Path's
    try:
        if path.is_dir() or (path.suffix == _SUFFIX and path.is_file()):
            return ""
        exists = path.exists()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if exists:
        return f"is neither a directory nor a GGUF file (*{_SUFFIX}): {_REMEDY}"
    return f"no such file or directory: {_REMEDY}" if split_hub_file(model) is None and _is_path(model) else ""


def split_hub_file(model: str) -> tuple[str, str] | None:
    """Return repository and file of `OWNER/NAME:FILE`, where FILE is a GGUF file or its quantisation; None for other
    names, and for what exists on this machine."""
    match = _HUB_FILE.fullmatch(model)
    if match is None or model.startswith((".", "~")) or os.path.exists(model):
        return None
    return match[1], match[2]


def _is_path(model: str) -> bool:
    """Whether a name has the form of a path: hub ids have one slash at most."""
    return model.endswith(_SUFFIX) or model.startswith(("/", ".", "~")) or model.count("/") > 1
