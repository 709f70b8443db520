"""Calls as JSON objects with a name and arguments, alone or in a list: Hermes, Llama, Mistral, Granite and others."""

from __future__ import annotations

from betoken.gateway.tool_calls.json_scanner import JsonScanner
from betoken.gateway.tool_calls.reader import CallReader, ReadCall
from betoken.gateway.tool_calls.stream import Read
from betoken.gateway.tool_calls.values import parsed_json, to_json

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_MAX_KEY_CHARS = 256


def json_calls(closing: str = "") -> ReadCall:
    """Reads the objects after an opening mark, up to `closing`."""

    def read(reader: CallReader, mark: str) -> Read[bool]:
        stream = reader.stream
        yield from stream.spaces()
        is_list = bool((yield from stream.take(("[",))))
        num = 0
        yield from stream.spaces()
        while (yield from stream.peek()) == "{":
            if num:
                stream.forget()
            if not (yield from json_call(reader)):
                return False
            num += 1
            spaces = yield from stream.spaces()
            yield from stream.take((",", ";"))
            spaces += yield from stream.spaces()
            if not closing:
                reader.writer.say(spaces)
        if not num:
            return False
        if is_list:
            yield from stream.take(("]",))
        if closing:
            yield from reader.close(closing)
        return True

    return read


def json_call(reader: CallReader) -> Read[bool]:
    """Read an object that is a call; whether it is one."""
    stream, writer = reader.stream, reader.writer
    name, given = "", ""
    is_written = False
    yield from stream.take(("{",))
    while True:
        yield from stream.spaces()
        if (yield from stream.take(("}",))):
            break
        key = yield from _string(reader)
        yield from stream.spaces()
        if key is None or not (yield from stream.take((":",))):
            if is_written or (name and given):
                break
            return False
        yield from stream.spaces()
        if key in _NAMES and not name:
            name = (yield from _string(reader)) or ""
            if name not in reader.tools:
                return False
        elif key in _ARGUMENTS and name and not is_written and (yield from stream.peek()) == "{":
            is_written = True
            writer.call(name)
            yield from reader.arguments()
        else:
            pieces: list[str] = []
            scanner = JsonScanner()
            yield from stream.json(scanner, pieces.append)
            if key in _ARGUMENTS:
                given = "".join(pieces)
            if not scanner.is_whole and not is_written:
                return False
        yield from stream.spaces()
        if not (yield from stream.take((",",))):
            yield from stream.take(("}",))
            break
    if is_written:
        return True
    arguments = _object(given or "{}")
    if not name or arguments is None:
        return False
    writer.call(name)
    writer.arguments(arguments)
    return True


def _object(text: str) -> str | None:
    """Arguments as an object, also if they are the text of one; None if they are neither."""
    value, is_json = parsed_json(text)
    if isinstance(value, str):
        text, (value, is_json) = value, parsed_json(value)
    if not is_json or not isinstance(value, dict):
        return None
    return text.strip() if text.strip().startswith("{") else to_json(value)


def _string(reader: CallReader) -> Read[str | None]:
    """Read a short JSON string; None if there is none."""
    if (yield from reader.stream.peek()) != '"':
        return None
    pieces: list[str] = []
    scanner = JsonScanner()
    yield from reader.stream.json(scanner, pieces.append)
    text = "".join(pieces)
    value, is_json = parsed_json(text) if scanner.is_whole and len(text) <= _MAX_KEY_CHARS else (None, False)
    return value if is_json and isinstance(value, str) else None
