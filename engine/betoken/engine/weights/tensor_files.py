"""Tensors by name, from safetensors files and from files that torch saved; contents are read one by one.

Headers of safetensors are checked against their files. No tensor that was read is mapped: its file's pages would count
as this process's memory for as long as one tensor lives.
"""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_is_file

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""By the names of safetensors."""
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself allows."""
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8
_PICKLED = (".bin", ".pt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor. Implements the slice interface of transformers' loader."""

    path: Path
    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    start: int
    """Bytes before it in the file."""
    num_bytes: int

    @property
    def is_floating_point(self) -> bool:
        """Whether its type is a floating-point type."""
        return self.dtype.startswith(("F", "BF"))

    def get_dtype(self) -> str:
        """See safetensors."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """See safetensors."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self.read()[index]
        return tensor

    def read(self) -> Tensor:
        """The tensor, in separate memory.

        Raises:
            ModelRefusedError: a dtype that torch has not, or the file ends before it does.
        """
        return self._read(self.shape, 1, 0, self.num_bytes)

    def part(self, axis: int, start: int, stop: int) -> "TensorPart":
        """The part [start, stop) along a dimension."""
        return TensorPart(self, axis, start, stop)

    def _read(self, shape: tuple[int, ...], num_runs: int, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of each of `num_runs` equal runs of the tensor."""
        if self.dtype not in DTYPES:
            raise ModelRefusedError(f"{self.path}: {self.name}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        data = np.empty((num_runs, stop - start), np.uint8)
        num_read = 0
        with self.path.open("rb", buffering=0) as file:
            for run in range(num_runs):
                file.seek(self.start + run * (self.num_bytes // num_runs) + start)
                num_read += _read_into(file, memoryview(data[run]))
        if num_read != data.size:
            raise ModelRefusedError(f"{self.path} is cut off: it lacks {data.size - num_read} bytes")
        return torch.from_numpy(data.reshape(-1)).view(DTYPES[self.dtype]).reshape(shape)


def _read_into(file: Any, wanted: memoryview) -> int:
    """Fill it; a system call reads at most 2 GiB. Returns the bytes read before the file ended."""
    num_read = 0
    while num_read < len(wanted) and (num := file.readinto(wanted[num_read:])):
        num_read += num
    return num_read


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a stored tensor, read without the rest. Implements the slice interface of transformers' loader."""

    whole: StoredTensor
    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        sizes = self.whole.shape
        return (*sizes[: self.axis], self.stop - self.start, *sizes[self.axis + 1 :])

    @property
    def is_floating_point(self) -> bool:
        """Whether its type is a floating-point type."""
        return self.whole.is_floating_point

    def get_dtype(self) -> str:
        """See safetensors."""
        return self.whole.dtype

    def get_shape(self) -> list[int]:
        """See safetensors."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        num_runs = prod(self.whole.shape[: self.axis])
        step = self.whole.num_bytes // max(1, num_runs * self.whole.shape[self.axis])
        found: Tensor = self.whole._read(self.shape, num_runs, self.start * step, self.stop * step)[index]
        return found


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor of a file that torch saved, mapped until it is read."""

    mapped: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.mapped.shape)

    @property
    def is_floating_point(self) -> bool:
        """Whether its type is a floating-point type."""
        return self.mapped.is_floating_point()

    def read(self) -> Tensor:
        """The tensor, in its own memory."""
        return self.mapped.clone()


FileTensor = StoredTensor | PickledTensor


def open_tensors(path: Path) -> Mapping[str, FileTensor]:
    """Tensors of a safetensors file, or of a `torch.save` file by the loader that makes only tensors.

    Raises:
        ModelRefusedError: it is neither, is cut off, or holds other objects.
    """
    check_is_file(path)
    try:
        return _open_pickled(path) if path.suffix in _PICKLED else read_header(path)
    except ModelRefusedError:
        raise
    except Exception as error:  # unpickling may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelRefusedError(f"{path.name}: {reason}") from error


def _open_pickled(path: Path) -> dict[str, PickledTensor]:
    if not zipfile.is_zipfile(path):  # older ones would have to be read whole
        raise ModelRefusedError(f"{path.name}: must be a file of torch 1.6 or later")
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelRefusedError(f"{path.name}: must hold tensors by name")
    return {str(name): PickledTensor(tensor) for name, tensor in content.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        ModelRefusedError: it is not a safetensors file, is truncated, or has an inconsistent tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ModelRefusedError(
                f"{path} is not a safetensors file, or cut off: a header of {length} bytes, in {size} and at most"
                f" {MAX_HEADER_BYTES}"
            )
        header = file.read(length)
    try:
        described = json.loads(header)
        described.pop("__metadata__", None)
        return {name: _tensor(path, name, entry, _LENGTH_BYTES + length, size) for name, entry in described.items()}
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever its contents are taken for
        raise ModelRefusedError(f"{path} is not a safetensors file: {type(error).__name__}: {error}") from error


def _tensor(path: Path, name: str, entry: dict[str, Any], data: int, size: int) -> StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [start, end, *shape]
    if any(type(number) is not int or number < 0 for number in numbers) or len(shape) > _MAX_DIMENSIONS or end < start:
        raise ModelRefusedError(f"{path} is not a safetensors file: {name}: {entry}")
    if (num_missing := data + end - size) > 0:
        raise ModelRefusedError(f"{path} is cut off: it lacks {num_missing} bytes")
    if dtype in DTYPES and prod(shape) * DTYPES[dtype].itemsize != end - start:
        raise ModelRefusedError(f"{path}: {name}: {end - start} bytes are not {shape} of {dtype}")
    return StoredTensor(path, name, dtype, tuple(shape), data + start, end - start)
