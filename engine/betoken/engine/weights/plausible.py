"""Bounds on a checkpoint, checked before its content is read: regular files, plain names, sizes that some machine could
hold. It knows no formats and loads nothing.
"""

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from betoken.engine.errors import ModelRefusedError

_READ_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
_SHARD_SUFFIX = ".safetensors"
_ADAPTER = "adapter_config.json"
_LARGEST: tuple[tuple[str, int], ...] = (
    (r"(num|n)_(hidden_|decoder_)?layers?", 10_000),
    (r"vocab_size", 1 << 26),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length", (1 << 31) - 1),
    (r".*(hidden_size|intermediate_size|hidden_dim|ffn_dim|head_dim|d_model|d_ff|n_embd|n_inner)", 1 << 22),
    (r"(num|n)_.*(heads?|experts?)", 1 << 16),
)
"""Largest numbers of config.json by the name's pattern: far above any model's, and far below what fills a machine."""


def check_files(directory: Path) -> None:
    """Refuse what cannot be read to an end, and an adapter, which nothing here applies.

    Raises:
        ModelRefusedError: a FIFO, a device or a socket under the name of a file that may be read, or an adapter.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in _READ_SUFFIXES and path.exists() and not path.is_dir():
            check_is_file(path)
    if (directory / _ADAPTER).exists():
        has_model = (directory / "config.json").exists()
        which = "an adapter together with its base model" if has_model else "an adapter without its base model"
        raise ModelRefusedError(
            f"{directory} holds {which} ({_ADAPTER}), which is not applied: merge the two into one checkpoint,"
            " or leave the adapter out"
        )


def check_is_file(path: Path) -> None:
    """Raises:
    ModelRefusedError: the name belongs to something other than a regular file.
    """
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise ModelRefusedError(f"{path} is not a regular file")


def shard_paths(index: Path, names: list[Any]) -> list[Path]:
    """The files named by an index of weights, in its folder.

    Raises:
        ModelRefusedError: a name that leaves the directory, or does not name a weight file.
    """
    for name in names:
        is_plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not is_plain or not name.endswith(_SHARD_SUFFIX):
            raise ModelRefusedError(f"{index} names {name!r}: must be a plain name that ends in {_SHARD_SUFFIX}")
        check_is_file(index.parent / name)
    return [index.parent / name for name in names]


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse numbers that would keep a machine busy or full before anything else could be found wrong.

    Args:
        config: the content of config.json.

    Raises:
        ModelRefusedError: with the field, its value and the limit.
    """
    for field, name, value in _integers(config, ""):
        for pattern, largest in _LARGEST:
            if re.fullmatch(pattern, name) and value > largest:
                raise ModelRefusedError(f"config.json: {field} = {value}: must be at most {largest}")


def _integers(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, int]]:
    """Path, name and value of every integer, also of those in nested objects."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _integers(value, f"{prefix}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{prefix}{name}", name, value
