"""The kinds of checkpoint that can be loaded: a directory in Hugging Face format, or a GGUF file.

It knows which files say what; `loading` what is asked of a model.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PreTrainedConfig

from betoken.common.gguf import GgufError, GgufHeader, find_gguf, read_header, read_tokenizer, whole_name
from betoken.common.model_path import split_hub_file
from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import ARCHITECTURES
from betoken.engine.weights import gguf
from betoken.engine.weights.checkpoint import Progress, resolve_directory, resolve_hub_file
from betoken.engine.weights.fingerprint import hash_tokenizer, hash_weights, read_headers
from betoken.engine.weights.language_model import draft_tensors, language_config, language_tensors, model_class_of
from betoken.engine.weights.plausible import check_files
from betoken.engine.weights.stored import Narrow, load_beside
from betoken.engine.weights.tensor_files import DTYPES, StoredTensor

_LOG = logging.getLogger(__name__)


class Source(Protocol):
    """The source of a model. Its methods raise whatever unreadable contents make others raise."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def path(self) -> Path:
        """The directory or file."""
        ...

    def config_dict(self) -> dict[str, Any]:
        """The configuration as it is stored, to find out its type."""
        ...

    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        ...

    def fingerprint(self) -> str:
        """Identifier of its weights."""
        ...

    def tokenizer_hash(self) -> str:
        """`hash_tokenizer_json` of its tokenizer, empty if it has none."""
        ...

    def tokenizer_text(self) -> str:
        """Its tokenizer as the text of a tokenizer.json, empty if it has none."""
        ...

    def load(
        self,
        config: PreTrainedConfig,
        keywords: dict[str, Any],
        progress: Callable[[float], None],
        narrow: Narrow | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """The model and transformers' report of it; `progress` gets the fraction of quantised weights read.
        `narrow` selects parts of the weights; None = whole weights."""
        ...


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A directory in Hugging Face format."""

    name: str
    path: Path

    def config_dict(self) -> dict[str, Any]:
        """See `Source`."""
        check_files(self.path)
        # transformers finds fault with the content of a config.json that is not there
        (self.path / "config.json").read_bytes()
        found: dict[str, Any] = PreTrainedConfig.get_config_dict(self.path)[0]
        return found

    def config(self) -> PreTrainedConfig:
        """See `Source`."""
        return language_config(AutoConfig.from_pretrained(self.path, trust_remote_code=False))

    def fingerprint(self) -> str:
        """See `Source`."""
        return hash_weights(self.path)

    def tokenizer_hash(self) -> str:
        """See `Source`."""
        return hash_tokenizer(self.path)

    def tokenizer_text(self) -> str:
        """See `Source`."""
        path = self.path / "tokenizer.json"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def load(
        self,
        config: PreTrainedConfig,
        keywords: dict[str, Any],
        progress: Callable[[float], None],
        narrow: Narrow | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """See `Source`."""
        tensors = read_headers(self.path)
        if left := draft_tensors(tensors, config.model_type):
            _LOG.info("%s: %d tensors of MTP layers, which the model itself does not use", self.name, len(left))
        state: dict[str, Any] = language_tensors(tensors)
        if keywords["dtype"] == "auto":
            keywords = keywords | {"dtype": config.dtype or _dtype_of(state)}
        return load_beside(model_class_of(config), config, state, keywords, narrow)


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file, which holds configuration, tokenizer and weights."""

    name: str
    header: GgufHeader
    _texts: list[str] = field(default_factory=list, compare=False, repr=False)
    """The tokenizer's text once it was read, which takes a second for a large vocabulary."""

    @property
    def path(self) -> Path:
        """See `Source`."""
        return self.header.path

    def config_dict(self) -> dict[str, Any]:
        """See `Source`."""
        return {"model_type": getattr(ARCHITECTURES.get(self.header.architecture), "model_type", "")}

    def config(self) -> PreTrainedConfig:
        """See `Source`."""
        return gguf.read_config(self.header)

    def fingerprint(self) -> str:
        """See `Source`."""
        return gguf.hash_header(self.header)

    def tokenizer_hash(self) -> str:
        """See `Source`."""
        return hash_tokenizer_json(self.tokenizer_text())

    def tokenizer_text(self) -> str:
        """See `Source`."""
        if not self._texts:
            self._texts.append(read_tokenizer(self.header).text)
        return self._texts[0]

    def load(
        self,
        config: PreTrainedConfig,
        keywords: dict[str, Any],
        progress: Callable[[float], None],
        narrow: Narrow | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """See `Source`."""
        return gguf.load(self.header, config, keywords, progress, narrow)


def _dtype_of(state: Mapping[str, StoredTensor]) -> torch.dtype:
    """The first that a model may compute in, as transformers takes where config.json names none."""
    names = (tensor.dtype for tensor in state.values() if tensor.dtype in ("BF16", "F16", "F32", "F64"))
    return DTYPES[next(names, "F32")]


def open_source(model: str, revision: str | None, progress: Progress = lambda stage, fraction: None) -> Source:
    """The checkpoint that `--model` means: a GGUF file, a directory, or a snapshot or GGUF file of the hub's.

    Raises:
        ModelRefusedError: it cannot be found or is none.
    """
    path = Path(os.path.expanduser(model))
    is_file = model.endswith(".gguf") and os.path.isfile(path)
    if is_file and revision is not None:
        raise ModelRefusedError(f"revision {revision!r} is one of the hub, and {model} is a file")
    if split_hub_file(model) is not None:
        path = resolve_hub_file(model, revision, progress)
    elif not is_file:
        path = resolve_directory(model, revision, progress)
    try:
        if (file := find_gguf(path)) is not None:
            return GgufSource(Path(whole_name(file.name)).stem, read_header(file))
    except (GgufError, OSError) as error:  # which name the file
        raise ModelRefusedError(str(error)) from error
    is_local = os.path.isdir(os.path.expanduser(model))
    return DirectorySource(path.resolve().name if is_local else model, path)
