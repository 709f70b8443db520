"""Names of models: a directory or GGUF file of this machine, or an id of the hub. It reads no contents."""

import os
from pathlib import Path

_SUFFIX = ".gguf"
_REMEDY = "name a directory, a GGUF file, or a hub id such as OWNER/NAME"


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
    return f"no such file or directory: {_REMEDY}" if _is_path(model) else ""


def _is_path(model: str) -> bool:
    """Whether a name has the form of a path: hub ids have one slash at most."""
    return model.endswith(_SUFFIX) or model.startswith(("/", ".", "~")) or model.count("/") > 1
