"""State that all formats share: the text of an answer, its parts so far, and the tools that may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from betoken.gateway.tool_calls.json_scanner import JsonScanner
from betoken.gateway.tool_calls.parts import PartWriter
from betoken.gateway.tool_calls.stream import Read, TextStream


@dataclass(slots=True)
class CallReader:
    """State of one answer that all formats use."""

    tools: Mapping[str, Any]
    """Schemas of the arguments of tools that may be called, by name."""
    stream: TextStream = field(default_factory=TextStream)
    writer: PartWriter = field(default_factory=PartWriter)
    unclosed: tuple[str, ...] = ()
    """Marks that end a call or section already read. They are not content."""

    def schema(self, name: str, key: str) -> Any:
        """Schema of one argument; None = unknown."""
        schema = self.tools.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties.get(key) if isinstance(properties, Mapping) else None

    def arguments(self) -> Read[None]:
        """Read an object and write it as arguments as it arrives. Missing closing brackets are added."""
        scanner = JsonScanner()
        yield from self.stream.json(scanner, self.writer.arguments)
        if scanner.is_broken:
            self.writer.arguments(scanner.missing)
        self.stream.forget()

    def close(self, *marks: str) -> Read[None]:
        """Read the marks that end a call, after superfluous brackets. The next call may begin without them."""
        yield from self.stream.run(lambda character: character.isspace() or character in "]}")
        for mark in marks:
            yield from self.stream.spaces()
            if not (yield from self.stream.take((mark,))):
                self.expect(mark)

    def expect(self, mark: str) -> None:
        """A mark that may follow without being content."""
        if mark not in self.unclosed:
            self.unclosed = (*self.unclosed, mark)


ReadCall: TypeAlias = Callable[[CallReader, str], Read[bool]]
"""Reads what follows an opening mark; whether it is a call. If not, the mark and the text read are content."""
