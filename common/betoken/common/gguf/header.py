"""The header of a GGUF file, read as what a stranger sent: every length is held against the file's own.

It reads metadata and the table of tensors, never their data. Source: ggml's docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 1 << 26
"""64 MiB: the largest vocabularies take a fifth of it."""
MAX_KEYS, MAX_TENSORS, MAX_DIMENSIONS, MAX_NAME_BYTES = 1 << 16, 1 << 17, 4, 1 << 16
MAX_ALIGNMENT = 1 << 16
MAX_LIST = 1 << 21

TYPES: Mapping[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98)},
    **{19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82)},
    **{23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    39: ("MXFP4", 32, 17),
}
"""By number: name, weights of a block and its bytes."""
_OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0"},
}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """A file is not GGUF, is cut off, or holds something unsupported; the message names field and value."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor."""

    path: Path
    """Its file."""
    name: str
    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    type: str
    """A name of `TYPES`."""
    start: int
    """Its first byte in the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension."""
        return self.num_bytes // max(1, prod(self.shape[:-1]))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The content of a file's header."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, booleans, texts, and lists of them."""
    tensors: tuple[GgufTensor, ...]
    """Tensors of the file and of all further parts."""
    num_bytes: int
    """Length of the header, the beginning of the tensors' data."""
    parts: tuple["GgufHeader", ...] = ()
    """Headers of the further parts of a model in several files."""

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.text("general.architecture"))

    def text(self, key: str) -> str:
        """A text of the metadata.

        Raises:
            GgufError: there is none of that name.
        """
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise GgufError(f"{self.path}: {key} = {value!r} is not text")
        return value


def read_part(path: Path) -> GgufHeader:
    """Read and check the header of one file, which may be a part of a model.

    Raises:
        GgufError: the file is not GGUF of version 2 or 3, is cut off, or breaks a limit. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise GgufError(f"{path} has {size} bytes and is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size).header()


class _Reader:
    """A cursor in a file; reads beyond the end are rejected in advance."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._end = min(size, MAX_HEADER_BYTES)
        self._at = 0

    def header(self) -> GgufHeader:
        if (magic := self._data[:4]) != b"GGUF":
            raise GgufError(f"{self._path} begins with {magic!r} and is not a GGUF file")
        self._at = 4
        version = self._number("I", "version")
        if version not in (2, 3):
            raise GgufError(f"{self._path}: version {version} is neither 2 nor 3")
        num_tensors = self._count("tensor count", "Q", MAX_TENSORS)
        num_keys = self._count("key count", "Q", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a key", MAX_NAME_BYTES)
            if key in metadata:
                raise GgufError(f"{self._path}: key {key!r} comes twice")
            metadata[key] = self._value(key, self._number("I", key))
        table = [self._tensor() for _ in range(num_tensors)]
        return self._placed(metadata, table)

    def _placed(self, metadata: dict[str, Any], table: list[tuple[str, tuple[int, ...], str, int, int]]) -> GgufHeader:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise GgufError(
                f"{self._path}: general.alignment = {alignment!r} is not a multiple of 8 up to {MAX_ALIGNMENT}"
            )
        data_start = -(-self._at // alignment) * alignment
        tensors = []
        for name, shape, type_name, offset, num_bytes in table:
            start = data_start + offset
            if start + num_bytes > self._size:
                missing = start + num_bytes - self._size
                raise GgufError(f"{self._path} is cut off: tensor {name!r} lacks {missing} bytes")
            if offset % alignment:
                raise GgufError(f"{self._path}: tensor {name!r} begins at {offset}, no multiple of {alignment}")
            tensors.append(GgufTensor(self._path, name, shape, type_name, start, num_bytes))
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise GgufError(f"{self._path}: tensors of one name")
        return GgufHeader(self._path, metadata, tuple(tensors), data_start)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        num_dimensions = self._count(f"dimensions of {name!r}", "I", MAX_DIMENSIONS)
        shape = tuple(self._number("Q", name) for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I", name), self._number("Q", name)
        if number not in TYPES:
            raise GgufError(
                f"{self._path}: tensor {name!r} has type {_OTHER_TYPES.get(number, 'unknown')} ({number}), none of"
                f" {', '.join(known for known, _, _ in TYPES.values())}"
            )
        type_name, block, block_bytes = TYPES[number]
        if not shape or 0 in shape or shape[-1] % block:
            raise GgufError(f"{self._path}: tensor {name!r}, {type_name}, has shape {list(shape)}: not whole blocks")
        num_bytes = prod(shape) // block * block_bytes
        if num_bytes > self._size or offset > self._size:
            raise GgufError(f"{self._path} is cut off: tensor {name!r} takes {num_bytes} bytes from {offset} on")
        return name, shape, type_name, offset, num_bytes

    def _value(self, key: str, number: int) -> Any:
        if number in _NUMBERS:
            return self._number(_NUMBERS[number], key)
        if number == _STRING:
            return self._text(key)
        if number != _ARRAY:
            raise GgufError(f"{self._path}: {key} has type {number}, which GGUF does not know")
        of = self._number("I", key)
        if of == _STRING:
            return self._texts(key, self._count(key, "Q", MAX_LIST, 8))
        if of not in _NUMBERS:
            raise GgufError(f"{self._path}: {key} is a list of type {of}, neither numbers nor texts")
        width = struct.calcsize("<" + _NUMBERS[of])
        count = self._count(key, "Q", MAX_LIST, width)
        return list(struct.unpack(f"<{count}{_NUMBERS[of]}", self._take(count * width, key)))

    def _texts(self, key: str, count: int) -> list[str]:
        """Reads as `_text` does, faster; vocabularies are long."""
        data, at, end, texts = self._data, self._at, self._end, []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                break  # `_text` says why
            try:
                texts.append(data[start:at].decode())
            except UnicodeDecodeError:
                break
            self._at = at
        return texts + [self._text(key) for _ in range(count - len(texts))]

    def _count(self, what: str, code: str, most: int, width: int = 0) -> int:
        """A count of things that take `width` bytes each at least."""
        count: int = self._number(code, what)
        if count > most or count * width > self._left():
            raise GgufError(
                f"{self._path}: {what}: {count} is more than {most if count > most else 'the header holds'}"
            )
        return count

    def _text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        taken = self._take(self._count(f"length of {what}", "Q", most, 1), what)
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{self._path}: {what} is not UTF-8: {error}") from error

    def _number(self, code: str, what: str) -> Any:
        width = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._take(width, what))[0]

    def _left(self) -> int:
        return self._end - self._at

    def _take(self, count: int, what: str) -> bytes:
        if count > self._left():
            reason = "is cut off" if self._end == self._size else f"has a header of more than {MAX_HEADER_BYTES} bytes"
            raise GgufError(f"{self._path} {reason}, at {what}")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken
