"""GGUF models in one file or in several: `NAME-00001-of-00003.gguf` has the metadata and names the number of parts.

Source: llama.cpp, tools/gguf-split and llama-model-loader.cpp (`split.no`, `split.count`, `split.tensors.count`).
"""

import re
from dataclasses import replace
from pathlib import Path

from betoken.common.gguf.header import GgufError, GgufHeader, read_part

SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
_MAX_NAMES = 4
"""File names listed by an error."""


def whole_name(file: str) -> str:
    """Return the name of a file without the number of its part: the same for all parts of a model."""
    return _PART.sub("", file)


def find_gguf(source: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a directory without config.json; None elsewhere. Of a
    model in several files it is the first.

    Raises:
        GgufError: a directory holds several and nothing else to load.
        OSError: the path may not be looked at.
    """
    if source.is_file():
        return source if source.suffix == SUFFIX else None
    if not source.is_dir() or (source / "config.json").exists():
        return None
    files = sorted(path for path in source.glob(f"*{SUFFIX}") if path.is_file())
    found = list({whole_name(path.name): path for path in reversed(files)}.values())[::-1]
    if len(found) > 1:
        raise GgufError(f"{source} holds {len(found)} GGUF files ({_listed(found)}): name one")
    return found[0] if found else None


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a file, and of all further parts if it is the first of several.

    Raises:
        GgufError: a file is not GGUF of version 2 or 3, is cut off, or breaks a limit; a part is missing, belongs to
            another model, or is not the first.
        OSError: a file cannot be read.
    """
    first = read_part(path)
    count, number = _count(first), _number(first)
    if count <= 1:
        return first
    match = _PART.search(path.name)
    if match is None or (int(match[1]), int(match[2])) != (number + 1, count):
        ending = _ending(number + 1, count)
        raise GgufError(
            f"{path}: split.no = {number} and split.count = {count}, but its name does not end in {ending}, so that the"
            " other parts cannot be found"
        )
    names = [path.with_name(path.name[: match.start()] + _ending(part + 1, count)) for part in range(count)]
    if number != 0:
        raise GgufError(f"{path} is part {number + 1} of {count}: name the first part, {names[0].name}")
    if missing := [name for name in names if not name.is_file()]:
        raise GgufError(f"{path}: {len(missing)} of {count} parts are missing: {_listed(missing)}")
    return _joined(first, [read_part(name) for name in names[1:]])


def _joined(first: GgufHeader, others: list[GgufHeader]) -> GgufHeader:
    count = len(others) + 1
    for number, other in enumerate(others, start=1):
        if (_number(other), _count(other)) != (number, count):
            raise GgufError(
                f"{other.path}: split.no = {_number(other)} and split.count = {_count(other)}: not part {number + 1} of"
                f" {count} of {first.path.name}"
            )
    tensors = [tensor for part in (first, *others) for tensor in part.tensors]
    seen = set[str]()
    for tensor in tensors:
        if tensor.name in seen:
            raise GgufError(f"{tensor.path}: tensor {tensor.name!r} is in an earlier part of the model, too")
        seen.add(tensor.name)
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise GgufError(f"{first.path}: split.tensors.count = {expected!r}, but the parts hold {len(tensors)} tensors")
    return replace(first, tensors=tuple(tensors), parts=tuple(others))


def _count(header: GgufHeader) -> int:
    return _integer(header, "split.count")


def _number(header: GgufHeader) -> int:
    return _integer(header, "split.no")


def _integer(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise GgufError(f"{header.path}: {key} = {value!r} is not a number of parts")
    return value


def _ending(part: int, count: int) -> str:
    return f"-{part:05d}-of-{count:05d}{SUFFIX}"


def _listed(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:_MAX_NAMES])
    return f"{names}, ..." if len(paths) > _MAX_NAMES else names
