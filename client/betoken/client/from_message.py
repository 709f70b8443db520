"""Protocol messages as the SDK's dataclasses, field by field of the same name.

A new field of a message needs a line in its dataclass and none here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

T = TypeVar("T")
Read = Callable[[Any], Any]

_NS = 1e-9


def from_message(kind: type[T], *messages: Message, **given: Any) -> T:
    """An instance of the dataclass `kind`: fields that are not `given` come from the first message that has them.

    A field `x_s` holds seconds; its message field is `x_ns`. Lists become tuples, maps become dicts.
    """
    hashable: Any = kind
    plan = _plan(hashable, tuple(message.DESCRIPTOR for message in messages), frozenset(given))
    return kind(**{name: read(messages[index]) for name, index, read in plan}, **given)


@cache
def _plan(kind: Any, messages: tuple[Descriptor, ...], given: frozenset[str]) -> list[tuple[str, int, Read]]:
    """For each field that is not given: its name, the index of its message, and how to read it."""
    plan = []
    for name in (field.name for field in fields(kind) if field.name not in given):
        sources = (name, f"{name.removesuffix('_s')}_ns") if name.endswith("_s") else (name,)
        found = [
            (index, source)
            for index, message in enumerate(messages)
            for source in sources
            if source in message.fields_by_name
        ]
        if not found:
            raise TypeError(f"{kind.__name__}.{name}: {', '.join(message.name for message in messages)} lacks it")
        index, source = found[0]
        plan.append((name, index, _reader(messages[index], source, is_time=source != name)))
    return plan


def _reader(message: Descriptor, name: str, *, is_time: bool) -> Read:
    field = message.fields_by_name[name]
    if is_time:
        return lambda source: getattr(source, name) * _NS
    if not field.is_repeated:
        return lambda source: getattr(source, name)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    return (lambda source: dict(getattr(source, name))) if is_map else (lambda source: tuple(getattr(source, name)))
