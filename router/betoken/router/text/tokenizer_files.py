"""The files of a tokenizer, from a GGUF file, a local directory or a hub id: what there is, and what is none of them.

Knows names and forms of files; what they mean for ids is not its matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from betoken.common.errors import FailedPreconditionError
from betoken.common.gguf import GgufError, GgufTokenizer, fetch_hub_file, find_gguf, read_header, read_tokenizer
from betoken.common.model_path import path_fault, split_hub_file

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
FIM_TOKENS = "fim_tokens"
"""Entry of the configuration with the fill-in-the-middle tokens that a GGUF file names."""
_SPECIAL_TOKENS, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


class TokenizerError(FailedPreconditionError):
    """The tokenizer's files are missing or unreadable."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents."""

    text: str
    """Content of `tokenizer.json`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of `tokenizer_config.json`, with content that older versions of transformers keep in separate files."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name."""


def read_files(source: str, revision: str | None) -> TokenizerFiles:
    """Read a GGUF file, a local directory or, where neither exists, a hub id at `revision`.

    Raises:
        TokenizerError: no `tokenizer.json` there, a broken file, or a directory and a revision.
    """
    directory = _find(source, revision)
    if (gguf := _gguf_tokenizer(directory)) is not None:
        templates = {} if gguf.chat_template is None else {"default": gguf.chat_template}
        return TokenizerFiles(gguf.text, {**gguf.config, FIM_TOKENS: gguf.fim_tokens}, templates)
    text = _read(directory, TOKENIZER, source)
    if text is None:
        raise TokenizerError(f"{_named(source, revision)} has no {TOKENIZER}")
    config = _read_object(directory, CONFIG, source)
    if "added_tokens_decoder" not in config:  # of older transformers: the special tokens may be there only
        config |= _read_object(directory, _SPECIAL_TOKENS, source)
        if added := _read_object(directory, _ADDED_TOKENS, source):
            config["added_tokens_decoder"] = _described(added, config)
    return TokenizerFiles(text, config, _templates(directory, config, source))


def _described(added: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of `added_tokens.json`, which has their ids alone, in the form of `added_tokens_decoder`."""
    named = [value for name, value in config.items() if name.endswith("_token")]
    for option in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(given := config.get(option), list):
            named += given
    special = {value.get("content") if isinstance(value, Mapping) else value for value in named if value is not None}
    return {
        str(token_id): {"content": content, "special": content in special, "normalized": content not in special}
        for content, token_id in added.items()
    }


def _templates(directory: Path, config: Mapping[str, Any], source: str) -> dict[str, str]:
    """Chat templates by name; separate files take precedence."""
    files = {}
    if (template := _read(directory, _TEMPLATE, source)) is not None:
        files["default"] = template
    for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja")):
        files[path.stem] = _read(directory, f"{_MORE_TEMPLATES}/{path.name}", source) or ""
    if files:
        return files
    given = config.get("chat_template")
    if isinstance(given, list):  # several named templates
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    named = given if isinstance(given, dict) else {"default": given}
    return {name: template for name, template in named.items() if isinstance(template, str)}


def _find(source: str, revision: str | None) -> Path:
    """The file or directory: itself, or a snapshot of the hub's, in which all files are of one commit."""
    if fault := path_fault(source):
        raise TokenizerError(f"{source!r}: {fault}")
    directory = Path(os.path.expanduser(source))  # as workers do for --model
    if directory.exists():
        if revision is not None:
            kind = "directory" if directory.is_dir() else "file"
            raise TokenizerError(f"revision {revision!r} is one of the hub, and {source} is a {kind}")
        return directory
    disable_progress_bars()  # standard error is the log
    try:
        if split_hub_file(source) is not None:
            return fetch_hub_file(source, revision)
        wanted = [TOKENIZER, CONFIG, _SPECIAL_TOKENS, _ADDED_TOKENS, _TEMPLATE, f"{_MORE_TEMPLATES}/*.jinja"]
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except GgufError as error:  # the repository has no such file
        raise TokenizerError(str(error)) from error
    except Exception as error:  # the hub client raises many types: network, authentication, validation
        reason = f"{type(error).__name__}: {error}"
        raise TokenizerError(f"the tokenizer of {_named(source, revision)} cannot be fetched: {reason}") from error


def _gguf_tokenizer(path: Path) -> GgufTokenizer | None:
    """Tokenizer of the GGUF file at the path; None for other files."""
    if (path / TOKENIZER).is_file():
        return None
    try:
        file = find_gguf(path)
        return None if file is None else read_tokenizer(read_header(file))
    except (GgufError, OSError) as error:
        raise TokenizerError(f"the tokenizer cannot be read: {error}") from error


def _named(source: str, revision: str | None) -> str:
    return source if revision is None else f"{source} at revision {revision!r}"


def _read(directory: Path, name: str, source: str) -> str | None:
    """Content of one file; None without one."""
    path = directory / name
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {name} of {source}: {error}") from error


def _read_object(directory: Path, name: str, source: str) -> dict[str, Any]:
    """The JSON object of one file; empty if the file is absent."""
    try:
        found = json.loads(_read(directory, name, source) or "{}")
    except ValueError as error:
        raise TokenizerError(f"{source}/{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{source}/{name} is not a JSON object")
    return found
