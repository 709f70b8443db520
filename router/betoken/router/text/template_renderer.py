"""The program of a rendering process: one chat template, in the sandbox and dialect that transformers uses.

A template and its arguments are foreign code. This process therefore has little memory, a time limit per chat that the
system keeps, and nothing to lose. Imports no module of the project, so that it starts fast and stays small. It reads
`<length><JSON>` from standard input and answers each with `<length><kind><text>`. The first is the template, which is
answered by the names of its variables.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct(">Q")
TEXT, REFUSAL = b"T", b"R"
_MAX_REFUSAL_CHARS = 1000


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the assistant's part for training and prints its body.

    Variables set in the body end with it, as in transformers.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def compile_template(source: str) -> tuple[jinja2.Template, list[str]]:
    """The template, with all that templates of models may call, and the names of the variables that it asks for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source), sorted(meta.find_undeclared_variables(environment.parse(source)))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _limit_memory(num_bytes: int) -> None:
    """`num_bytes` in addition to the memory in use."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


def _answer(target: BinaryIO, kind: bytes, text: str) -> None:
    data = kind + text.encode("utf-8", "surrogatepass")
    target.write(LENGTH.pack(len(data)))
    target.write(data)
    target.flush()


def _read(source: BinaryIO) -> Any:
    """The next JSON value; None at the end of input."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return json.loads(source.read(LENGTH.unpack(head)[0]).decode("utf-8", "surrogatepass"))


def main() -> None:
    """Render until standard input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(source)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _limit_memory(setup["max_memory_bytes"])
    template: jinja2.Template | None = None
    variables: Any = setup
    while variables is not None:
        # The signal ends the process, be the interpreter in one long operation; a handler would wait for its end.
        signal.setitimer(signal.ITIMER_PROF, setup["max_cpu_s"])
        try:
            if template is None:
                template, names = compile_template(setup["source"])
                text = json.dumps(names)
            else:
                text = template.render(**variables)
            if len(text) > setup["max_chars"]:
                raise ValueError(f"{len(text)} characters; at most {setup['max_chars']} may be rendered")
            _answer(target, TEXT, text)
        except BaseException as error:  # templates raise what they like
            _answer(target, REFUSAL, (str(error) or type(error).__name__)[:_MAX_REFUSAL_CHARS])
            if template is None:
                return
        text = ""
        variables = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        variables = _read(source)


if __name__ == "__main__":
    main()
