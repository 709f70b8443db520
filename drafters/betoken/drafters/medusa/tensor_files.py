"""Tensors by name from safetensors, or from torch's own files by the loader that makes nothing but tensors.

Shapes are told without reading contents. Knows files, not what the tensors mean.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_is_file

_PICKLED = (".pt", ".bin")


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor that was not read yet."""

    shape: tuple[int, ...]
    is_floating_point: bool
    read: Callable[[], Tensor]
    """Reads it, on the CPU."""


def find_file(directory: Path, names: Sequence[str]) -> Path:
    """The first of these files that is there.

    Raises:
        ModelRefusedError: none is, or it is no regular file.
    """
    for name in names:
        if (directory / name).exists():
            check_is_file(directory / name)
            return directory / name
    raise ModelRefusedError(f"there is none of {', '.join(names)}")


def open_tensors(path: Path) -> Mapping[str, UnreadTensor]:
    """Every tensor of a file.

    Raises:
        ModelRefusedError: it is no such file, or holds other things than tensors.
    """
    try:
        return _open_pickled(path) if path.suffix in _PICKLED else _open_safe(path)
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever its contents are taken for
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelRefusedError(f"{path.name} cannot be read: {reason}") from error


def _open_safe(path: Path) -> dict[str, UnreadTensor]:
    found = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            is_float = str(part.get_dtype()).startswith(("F", "BF"))
            found[name] = UnreadTensor(tuple(part.get_shape()), is_float, partial(_read_safe, path, name))
    return found


def _read_safe(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _open_pickled(path: Path) -> dict[str, UnreadTensor]:
    if not zipfile.is_zipfile(path):  # older ones would have to be read whole
        raise ModelRefusedError(f"{path.name} is no file of torch 1.6 or later")
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelRefusedError(f"{path.name} holds other things than tensors by name")
    return {
        str(name): UnreadTensor(tuple(tensor.shape), tensor.is_floating_point(), tensor.clone)
        for name, tensor in content.items()
    }
