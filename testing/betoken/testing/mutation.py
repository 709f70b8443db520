"""Mutations of protobuf messages that know their structure: values at the edges of each type, and fields that come, go
and repeat. Some mutants are random bytes. Seeded: the same seed gives the same mutants.

Knows descriptors; knows no message by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_MessageT = TypeVar("_MessageT", bound=Message)

_MAX_MUTATIONS = 4
_BYTES_SHARE = 0.15
"""Mutants that are damaged as bytes."""
_MAX_ADDED = 40
_MANY = 70_000
"""Entries of a list now and then: more than a frame may hold."""
_MANY_SHARE = 0.01
_TEXTS = ("", " ", "a", "\0", "\x1b[2J\n", "\N{EURO SIGN}", "\N{CRAB}" * 40, "x" * 300, "x" * 70_000, "{{ 1 }}")
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 0.5, 101.0)

_INT_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (31, True),
    FieldDescriptor.CPPTYPE_INT64: (63, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}


class Mutator:
    """A stream of mutants."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutant(self, original: _MessageT) -> _MessageT:
        """A copy with one to a few changes, each somewhere in its tree."""
        mutant = type(original)()
        mutant.CopyFrom(original)
        for _ in range(self.random.randint(1, _MAX_MUTATIONS)):
            self._change(self._somewhere(mutant))
        return mutant

    def mutant_bytes(self, original: Message, damaged_share: float = _BYTES_SHARE) -> bytes:
        """A mutant as it goes over the wire; of a share the bytes themselves are damaged."""
        data = self.mutant(original).SerializeToString()
        return self._damaged(data) if self.random.random() < damaged_share else data

    def _somewhere(self, message: Any) -> Any:
        """The message itself, or one below it."""
        below: list[Any] = []
        for field, value in message.ListFields():
            if field.message_type is not None and not _is_map(field):
                below += list(value) if field.is_repeated else [value]
        if not below or self.random.random() < 0.3:
            return message
        return self._somewhere(self.random.choice(below))

    def _change(self, message: Any) -> None:
        field = self.random.choice(message.DESCRIPTOR.fields or [None])
        if field is None:  # a message without fields
            return
        if self.random.random() < 0.15:
            message.ClearField(field.name)
        elif _is_map(field):
            self._change_map(getattr(message, field.name), field)
        elif field.is_repeated:
            self._change_list(getattr(message, field.name), field)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            self._change(getattr(message, field.name))
        else:
            setattr(message, field.name, self._value(field))

    def _change_map(self, entries: Any, field: Any) -> None:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(self.random.choice((1, 1, 40))):
            entries[f"{self._value(key)}{self.random.randint(0, 99)}"] = self._value(value)

    def _change_list(self, entries: Any, field: Any) -> None:
        kinds: list[Callable[[Any, Any], None]] = [self._add, self._add, self._drop, self._repeat, self._shuffle]
        self.random.choice(kinds)(entries, field)

    def _add(self, entries: Any, field: Any) -> None:
        if field.message_type is not None:
            for _ in range(self.random.randint(1, 4)):
                self._change(entries.add())
        elif field.cpp_type != FieldDescriptor.CPPTYPE_STRING and self.random.random() < _MANY_SHARE:
            entries.extend([self._value(field)] * _MANY)
        else:
            entries.extend([self._value(field) for _ in range(self.random.randint(1, _MAX_ADDED))])

    def _drop(self, entries: Any, field: Any) -> None:
        if entries:
            del entries[self.random.randrange(len(entries))]

    def _repeat(self, entries: Any, field: Any) -> None:
        if entries:
            entries.append(self.random.choice(list(entries)))

    def _shuffle(self, entries: Any, field: Any) -> None:
        values = list(entries)
        self.random.shuffle(values)
        del entries[:]
        entries.extend(values)

    def _value(self, field: Any) -> Any:
        kind = field.cpp_type
        if kind in _INT_BITS:
            bits, is_signed = _INT_BITS[kind]
            values = [0, 1, 2, 7, 255, 256, 65_537, (1 << bits) - 1]
            values += [self.random.getrandbits(8), self.random.getrandbits(bits)]
            return self.random.choice([*values, -1, -(1 << bits)] if is_signed else values)
        match kind:
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.random.choice([*_FLOATS, self.random.uniform(-3, 3)])
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.random.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.random.choice([*(value.number for value in field.enum_type.values), 99, -1, (1 << 31) - 1])
        text = self.random.choice(_TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text

    def _damaged(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        for _ in range(self.random.randint(1, _MAX_MUTATIONS)):
            place = self.random.randint(0, len(damaged))
            match self.random.randrange(4):
                case 0:
                    damaged[place:] = b""
                case 1:
                    damaged[place:place] = self.random.randbytes(self.random.randint(1, 16))
                case 2:
                    damaged[place : place + 1] = bytes([self.random.getrandbits(8)])
                case _:
                    end = self.random.randint(place, len(damaged))
                    damaged[place:place] = damaged[place:end]
        return bytes(damaged)


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)
