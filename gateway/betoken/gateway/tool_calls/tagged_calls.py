"""Calls with a pair of tags per argument: Qwen3-Coder, Seed-OSS, GLM, Hunyuan, MiniMax, DeepSeek's DSML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from betoken.gateway.tool_calls.reader import CallReader
from betoken.gateway.tool_calls.stream import Read
from betoken.gateway.tool_calls.values import to_json, value_of_text

_MAX_NAME_CHARS = 512


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format."""

    opening: str
    """Mark before the calls."""
    call: str
    """Text before a name; empty = the opening mark alone."""
    call_ends: tuple[str, ...]
    """Texts after a name."""
    key: str
    key_end: str
    value: str
    """Text between a key and its value, after `key_end`."""
    value_end: str
    end: str
    """Text after the last argument; empty = the closing mark alone."""
    closing: str
    """Mark after the calls."""
    trims_lines: bool = False
    """Whether a line end before and after a value belongs to the tags."""

    def __call__(self, reader: CallReader, mark: str) -> Read[bool]:
        """Read the calls after an opening mark."""
        stream, num = reader.stream, 0
        while True:
            if mark != self.call:
                yield from stream.spaces()
                if self.call and not (yield from stream.take((self.call,))):
                    break
            mark = self.opening
            if not (yield from self._call(reader)):
                return False
            num += 1
            stream.forget()
            if not self.call:
                return True
        if num:
            yield from reader.close(self.closing)
        return num > 0

    def _call(self, reader: CallReader) -> Read[bool]:
        stream, ends = reader.stream, (*self.call_ends, self.key, self.closing)
        yield from stream.spaces()
        name = (yield from stream.run(lambda c: c.isalnum() or c in "_.-", _MAX_NAME_CHARS)).strip()
        yield from stream.spaces()
        end = yield from stream.take(sorted(set(ends), key=len, reverse=True))
        if name not in reader.tools or not end:
            return False
        if end not in self.call_ends:
            stream.unread(end)
        reader.writer.call(name)
        written = "{"
        while True:
            stream.forget()
            yield from stream.spaces()
            if not (yield from stream.take((self.key,))):
                break
            pair = yield from self._pair(reader, name)
            if pair is None:
                reader.writer.arguments(written if written == "{" else "")
                return True
            reader.writer.arguments(written + pair)
            written = ", "
        reader.writer.arguments("{}" if written == "{" else "}")
        if self.end:
            yield from stream.take((self.end,))
        else:
            yield from reader.close(self.closing)
        return True

    def _pair(self, reader: CallReader, name: str) -> Read[str | None]:
        """One key and its value as JSON; None if the answer ends first."""
        stream = reader.stream
        pieces: list[str] = []
        if not (yield from stream.until((self.key_end,), pieces.append)):
            return None
        key, _, attributes = "".join(pieces).strip().partition('"')
        if self.value:
            yield from stream.spaces()
            yield from stream.take((self.value,))
        pieces = []
        end = yield from stream.until(self._value_ends(), pieces.append)
        if not end:
            return None
        if end != self.value_end:
            stream.unread(end)
        text = "".join(pieces)
        if self.trims_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        is_string = 'string="true"' in attributes
        value = to_json(text) if is_string else value_of_text(text, reader.schema(name, key))
        return f"{to_json(key)}: {value}"

    def _value_ends(self) -> Sequence[str]:
        """A value without its end tag ends with the call, or before the next one."""
        return [mark for mark in (self.value_end, self.end, self.closing, self.opening) if mark]


QWEN3_CODER = Tags(
    *("<tool_call>", "<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>"),
    trims_lines=True,
)
SEED_OSS = Tags(
    *("<seed:tool_call>", "<function=", (">",), "<parameter=", ">", "", "</parameter>"),
    *("</function>", "</seed:tool_call>"),
    trims_lines=True,
)
GLM = Tags("<tool_call>", "", (), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "</tool_call>")
HUNYUAN = Tags(
    *("<tool_call>", "", ("<tool_sep>",), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "</tool_call>")
)
MINIMAX = Tags(
    *("<minimax:tool_call>", '<invoke name="', ('">',), '<parameter name="', ">", "", "</parameter>"),
    *("</invoke>", "</minimax:tool_call>"),
)
_DSML = "｜DSML｜"


def dsml(section: str) -> Tags:
    """DeepSeek's tags, whose section is called `function_calls` or `tool_calls`."""
    return Tags(
        *(f"<{_DSML}{section}>", f'<{_DSML}invoke name="', ('">',), f'<{_DSML}parameter name="', ">", ""),
        *(f"</{_DSML}parameter>", f"</{_DSML}invoke>", f"</{_DSML}{section}>"),
    )
