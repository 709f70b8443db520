"""Calls as a name and then JSON arguments: Mistral 3, DeepSeek, Kimi K2."""

from __future__ import annotations

from betoken.gateway.tool_calls.reader import CallReader, ReadCall
from betoken.gateway.tool_calls.stream import Read

_MAX_NAME_CHARS = 160


def is_name(character: str) -> bool:
    """Whether a tool's name may contain it."""
    return character.isalnum() or character in "_.-"


def mistral_call(reader: CallReader, mark: str) -> Read[bool]:
    """Reads `name[CALL_ID]id[ARGS]{...}`, ids and `[ARGS]` being optional."""
    stream = reader.stream
    yield from stream.spaces()
    name = yield from stream.run(is_name, _MAX_NAME_CHARS)
    yield from stream.spaces()
    if name in reader.tools and (yield from stream.take(("[CALL_ID]",))):
        yield from stream.spaces()
        yield from stream.run(is_name, _MAX_NAME_CHARS)
        yield from stream.spaces()
    yield from stream.take(("[ARGS]",))
    yield from stream.spaces()
    return (yield from _arguments(reader, name))


def section(begin: str, call: str, separator: str, call_end: str, end: str, prefix: str = "") -> ReadCall:
    """Reads calls within a section: `begin call prefix name separator {...} call_end ... end`.

    The call's type may precede its name (DeepSeek V3: `function` and a separator), a number follow it (Kimi), and
    arguments be fenced.
    """

    def read(reader: CallReader, mark: str) -> Read[bool]:
        stream = reader.stream
        if mark == begin:
            reader.expect(end)
            yield from stream.spaces()
            if not (yield from stream.take((call,))):
                return False
        yield from stream.spaces()
        yield from stream.take((prefix,) if prefix else ())
        name = yield from stream.run(is_name, _MAX_NAME_CHARS)
        if (yield from stream.take((":",))):
            yield from stream.run(str.isdigit, 9)
        yield from stream.spaces()
        if not (yield from stream.take((separator,))):
            return False
        yield from stream.spaces()
        if name not in reader.tools or (yield from stream.peek()) not in ("{", "`"):
            name = yield from stream.run(is_name, _MAX_NAME_CHARS)
            yield from stream.spaces()
        if (yield from stream.take(("```json", "```"))):
            yield from stream.spaces()
        if not (yield from _arguments(reader, name)):
            return False
        yield from stream.spaces()
        yield from stream.take(("```",))
        yield from reader.close(call_end)
        reader.expect(end)
        return True

    return read


def _arguments(reader: CallReader, name: str) -> Read[bool]:
    if name not in reader.tools or (yield from reader.stream.peek()) != "{":
        return False
    reader.writer.call(name)
    yield from reader.arguments()
    return True
