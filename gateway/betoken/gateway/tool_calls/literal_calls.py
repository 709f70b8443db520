"""Calls with literals as arguments: `[f(a="x", n=3)]` of LFM2, and `call:f{a:<|"|>x<|"|>,n:3}` of Gemma 4."""

from __future__ import annotations

from typing import Any

from betoken.gateway.tool_calls.reader import CallReader
from betoken.gateway.tool_calls.stream import Read
from betoken.gateway.tool_calls.values import LiteralReader, to_json

_PYTHON_QUOTES = ('"', "'")
_GEMMA_QUOTES = ('<|"|>', '"')


def lfm2_calls(reader: CallReader, mark: str) -> Read[bool]:
    """Reads Python calls up to `<|tool_call_end|>`."""
    text = yield from _until(reader, mark, "<|tool_call_end|>")
    literals = LiteralReader(text, _PYTHON_QUOTES, has_escapes=True)
    calls: list[tuple[str, dict[str, Any]]] = []
    try:
        is_list = literals.takes("[")
        while not literals.has_ended and not literals.takes("]"):
            name = literals.name()
            if not literals.takes("("):
                raise ValueError("no arguments")
            calls.append((name, literals.pairs("=", ")")))
            if not literals.takes(",") and not is_list:
                break
    except ValueError:
        return False
    return _write(reader, calls)


def gemma_call(reader: CallReader, mark: str) -> Read[bool]:
    """Reads a call up to `<tool_call|>`."""
    text = yield from _until(reader, mark, "<tool_call|>")
    literals = LiteralReader(text, _GEMMA_QUOTES, has_escapes=False)
    try:
        if not literals.takes("call:"):
            return False
        name = literals.name()
        if not literals.takes("{"):
            return False
        return _write(reader, [(name, literals.pairs(":", "}"))])
    except ValueError:
        return False


def _until(reader: CallReader, opening: str, closing: str) -> Read[str]:
    pieces: list[str] = []
    end = yield from reader.stream.until((closing, opening), pieces.append)
    if end == opening:
        reader.stream.unread(end)
    return "".join(pieces)


def _write(reader: CallReader, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    if not calls or not all(name in reader.tools for name, _ in calls):
        return False
    for name, arguments in calls:
        reader.writer.call(name)
        reader.writer.arguments(to_json(arguments))
    return True
