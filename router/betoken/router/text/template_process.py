"""A process that renders chats, kept warm, and what ends it: too long a time, or its own end.

Blocks its caller's thread. Knows pipes and limits; knows neither templates nor requests.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from betoken.router.text.template_renderer import LENGTH, TEXT

_RENDERER = Path(__file__).with_name("template_renderer.py")
MAX_CPU_S = 2.0
"""Processor seconds of one chat, or of the template's compilation: thousands of messages take a tenth of it."""
_MAX_WALL_S = 20.0
_MAX_MEMORY_BYTES = 256 << 20


class RenderingFailedError(Exception):
    """The template refuses these arguments, or rendering them took too much; the text says which."""


class TemplateProcess:
    """One process, for one chat at a time."""

    def __init__(self, source: str, max_chars: int) -> None:
        """`max_chars`: most of a rendered chat.

        Raises:
            RenderingFailedError: the template does not compile, or not in time.
        """
        pipe, program = subprocess.PIPE, [sys.executable, "-P", str(_RENDERER)]
        # In its own session: terminal input and signals do not reach it. It ends with its standard input.
        self._process = subprocess.Popen(
            program,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        limits = {"max_chars": max_chars, "max_cpu_s": MAX_CPU_S, "max_memory_bytes": _MAX_MEMORY_BYTES}
        self._max_answer_bytes = 4 * max_chars + 1
        try:
            self.names = frozenset(json.loads(self._ask({"source": source, **limits})))
            """Variables that the template asks for."""
        except RenderingFailedError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it takes another chat."""
        return self._process.poll() is None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text with these variables.

        Raises:
            RenderingFailedError: it refuses them, or takes too much time or memory; where not `is_alive` then, another
                process has to be made.
        """
        return self._ask(variables)

    def close(self) -> None:
        """End it; idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _ask(self, question: Mapping[str, Any]) -> str:
        is_heard = False
        try:
            answer = self._exchange(json.dumps(question, ensure_ascii=False).encode("utf-8", "surrogatepass"))
            is_heard = True
        except OSError:  # it has ended: its time was over, or memory ran out
            limits = f"{MAX_CPU_S:g} s of a processor, {_MAX_MEMORY_BYTES >> 20} MiB"
            raise RenderingFailedError(f"it takes more than it may ({limits})") from None
        finally:
            if not is_heard:
                self.close()
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != TEXT:
            raise RenderingFailedError(text)
        return text

    def _exchange(self, data: bytes) -> bytes:
        deadline_s = time.monotonic() + _MAX_WALL_S
        assert self._process.stdin is not None
        view = memoryview(LENGTH.pack(len(data)) + data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]
        length = LENGTH.unpack(self._receive(LENGTH.size, deadline_s))[0]
        if length > self._max_answer_bytes:
            raise OSError("an answer too long")
        return self._receive(length, deadline_s)

    def _receive(self, num_bytes: int, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(data) < num_bytes:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(descriptor, min(1 << 20, num_bytes - len(data)))
            if not part:
                raise OSError("it has ended")
            data += part
        return bytes(data)
