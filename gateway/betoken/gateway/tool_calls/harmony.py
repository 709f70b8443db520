"""Messages of gpt-oss: reasoning, calls and content, each with a header that names its channel and recipient."""

from __future__ import annotations

from betoken.gateway.tool_calls.named_calls import is_name
from betoken.gateway.tool_calls.reader import CallReader
from betoken.gateway.tool_calls.stream import Read

BEGINNINGS = ("<|channel|>", "<|start|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_RECIPIENT = "to=functions."


def harmony_messages(reader: CallReader) -> Read[None]:
    """Read all messages of an answer, from the first message's header."""
    stream, writer = reader.stream, reader.writer
    while True:
        pieces: list[str] = []
        stream.forget()
        if not (yield from stream.until(("<|message|>",), pieces.append)):
            return
        header = "".join(pieces)
        stream.forget()
        name = _name(header)
        if name in reader.tools:
            yield from stream.spaces()
            writer.call(name)
            yield from reader.arguments()
            yield from stream.until(_ENDS, lambda _: None)
        elif "analysis" in header:
            writer.begin_reasoning()
            yield from stream.until(_ENDS, writer.reason)
            writer.end_reasoning()
        else:
            yield from stream.until(_ENDS, writer.say)


def _name(header: str) -> str:
    """The function that a message is sent to; empty if it is not sent to one."""
    _, mark, after = header.partition(_RECIPIENT)
    end = next((at for at, character in enumerate(after) if not is_name(character)), len(after))
    return after[:end] if mark else ""
