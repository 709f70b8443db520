"""The place of a checkpoint's files: a directory, or a fetch from the hub. It knows their names, not their contents."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from betoken.common.gguf import GgufError, fetch_hub_file
from betoken.common.model_path import path_fault
from betoken.engine.errors import ModelRefusedError

_WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_UNWANTED_FILES = ("*/*", "consolidated*")
"""Files that hold the same weights again in their makers' layout, as repositories of gpt-oss, Llama, Mistral do."""

Progress = Callable[[str, float], None]
"""Called with what is done now and the fraction of loading done so far, in [0, 1]; of the download while that runs."""


def resolve_directory(
    model: str, revision: str | None, progress: Progress = lambda stage, fraction: None, also: Sequence[str] = ()
) -> Path:
    """The directory of a checkpoint: itself, or a snapshot of the hub's, of whose files `also` names further ones.

    Raises:
        ModelRefusedError: it is neither a directory nor a hub id that can be fetched, or a directory with a revision.
    """
    if fault := path_fault(model):
        raise ModelRefusedError(f"{model!r}: {fault}")
    directory = Path(os.path.expanduser(model))  # a user that does not exist is left alone, where Path's raises
    if directory.is_dir():
        if revision is not None:
            raise ModelRefusedError(f"revision {revision!r} is one of the hub, and {model} is a directory")
        return directory
    try:
        options: dict[str, Any] = {"allow_patterns": [*_WANTED_FILES, *also], "ignore_patterns": _UNWANTED_FILES}
        return Path(snapshot_download(model, revision=revision, tqdm_class=_bar_telling(progress), **options))
    except Exception as error:  # the hub client raises many types: network, authentication, validation
        which = "" if revision is None else f" at revision {revision!r}"
        what = f"{model!r} is not a directory and cannot be fetched from the hub{which}"
        raise ModelRefusedError(f"{what}: {type(error).__name__}: {error}") from error


def resolve_hub_file(model: str, revision: str | None, progress: Progress = lambda stage, fraction: None) -> Path:
    """The GGUF file that `OWNER/NAME:FILE` names.

    Raises:
        ModelRefusedError: the repository has no such file, or cannot be fetched.
    """
    try:
        return fetch_hub_file(model, revision, tqdm_class=_bar_telling(progress))
    except GgufError as error:
        raise ModelRefusedError(str(error)) from error
    except Exception as error:  # the hub client raises many types: network, authentication, validation
        which = "" if revision is None else f" at revision {revision!r}"
        what = f"{model!r} cannot be fetched from the hub{which}"
        raise ModelRefusedError(f"{what}: {type(error).__name__}: {error}") from error


def _bar_telling(progress: Progress) -> type[tqdm]:
    """The hub client's progress bar. It prints nothing, since standard error is the log, and calls `progress`."""
    lock = Lock()  # several files are fetched at once

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._is_of_bytes = options.get("unit") == "B"
            self._num_done = 0.0  # disabled, it does not count
            self._told_percent = 0
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            with lock:
                self._num_done += n or 0
                if self._is_of_bytes and self.total:
                    # The total leaves out files whose turn is still to come, so the percentage may fall.
                    percent = min(100, int(100 * self._num_done / self.total))
                    if percent != self._told_percent:
                        self._told_percent = percent
                        progress("downloading", percent / 100)
            return None

    return Bar
