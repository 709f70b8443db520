"""Decodes requests so that bytes which are no such message get a typed refusal instead of gRPC's own UNKNOWN.

Names the text field whose bytes are not UTF-8; knows messages by their descriptors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from foretoken.rpc.errors import InvalidArgumentError

_MAX_FIELDS = 16384  # that are looked at, some 20 ms; other streams wait meanwhile

Request = TypeVar("Request", bound=Message)


class Decoded(Generic[Request]):
    """A request, or why it is none; made where gRPC decodes, opened where errors are answered."""

    __slots__ = ("_error", "_message")

    def __init__(self, message: Request | None, error: InvalidArgumentError | None) -> None:
        self._message = message
        self._error = error

    def open(self) -> Request:
        """The request.

        Raises:
            InvalidArgumentError: its bytes are no such message.
        """
        if self._message is None:
            assert self._error is not None
            raise self._error
        return self._message


def decoder(message_type: type[Request]) -> Callable[[bytes], Decoded[Request]]:
    """A request deserializer that never raises."""

    def decode(data: bytes) -> Decoded[Request]:
        try:
            return Decoded(message_type.FromString(data), None)
        except DecodeError:
            return Decoded(None, _refusal(message_type.DESCRIPTOR, data))

    return decode


def _refusal(descriptor: Any, data: bytes) -> InvalidArgumentError:
    try:
        for path, text in _texts(descriptor, data, "", iter(range(_MAX_FIELDS))):
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                return InvalidArgumentError(path, text[error.start : error.end], "must be valid UTF-8")
    except (IndexError, ValueError):
        pass
    return InvalidArgumentError("request", f"{len(data)} bytes", f"must be a {descriptor.full_name}")


def _texts(descriptor: Any, data: bytes, prefix: str, budget: Iterator[int]) -> Iterator[tuple[str, bytes]]:
    """Every text field on the wire, by path; those of as many fields as `budget` has left."""
    counts: dict[int, int] = {}
    for (number, value), _ in zip(_fields(data), budget, strict=False):
        field: Any = descriptor.fields_by_number.get(number)
        if field is None or not isinstance(value, bytes):
            continue
        index = counts[number] = counts.get(number, -1) + 1
        path = f"{prefix}{field.name}[{index}]" if field.is_repeated else f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            yield path, value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from _texts(field.message_type, value, f"{path}.", budget)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Field numbers on the wire, with the content of the length-delimited ones.

    Raises:
        IndexError, ValueError: the bytes are cut short or no protobuf.
    """
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value: bytes | None = None
        match tag & 7:
            case 0:
                _, position = _varint(data, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(data, position)
                value = data[position : position + length]
                position += length
            case 5:
                position += 4
            case _:
                raise ValueError("groups are not used")
        if position > len(data):
            raise IndexError("cut short")
        yield tag >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 64 bits")
