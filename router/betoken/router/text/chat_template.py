"""Renders chat messages through a model's Jinja template, in processes of their own with little memory and time.

A template is somebody else's program: whatever it raises, and whatever it takes, is the request's fault, not ours.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping, Sequence

from betoken.common.errors import InvalidArgumentError, ResourceExhaustedError
from betoken.router.text.template_process import RenderingFailedError, TemplateProcess

MAX_RENDERED_CHARS = 1 << 25
NUM_PROCESSES = 2
"""That render at once; a chat which takes long leaves one for the others."""
_WAIT_S = 30.0
_RETRY_AFTER_S = 1.0


class TemplateError(Exception):
    """The template does not compile."""


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Starts the first process.

        Raises:
            TemplateError: the template does not compile.
        """
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._processes = _Processes(source)
        weakref.finalize(self, self._processes.close)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, ending where the assistant's answer begins. Blocks its thread.

        Raises:
            InvalidArgumentError: the template refuses these messages, or takes too much for them.
            ResourceExhaustedError: other chats take too long.
        """
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        try:
            return self._processes.render(variables)
        except RenderingFailedError as error:
            roles = [message.get("role", "") for message in messages]
            raise InvalidArgumentError("messages", roles, f"refused by the model's chat template: {error}") from error

    @staticmethod
    def missing() -> InvalidArgumentError:
        """The error for chat messages to a model that has no template."""
        return InvalidArgumentError("messages", "set", "the model has no chat template; send prompt or prompt_ids")


class _Processes:
    """The processes of one template; each is made when it is needed first, and again once it was ended."""

    def __init__(self, source: str) -> None:
        self._source = source
        try:
            first = TemplateProcess(source, MAX_RENDERED_CHARS)
        except RenderingFailedError as error:
            raise TemplateError(str(error)) from error
        self._idle: queue.LifoQueue[TemplateProcess | None] = queue.LifoQueue()  # the last used is the warmest
        for _ in range(NUM_PROCESSES - 1):
            self._idle.put(None)
        self._idle.put(first)
        self._lock = threading.Lock()
        self._all = {first}

    def render(self, variables: Mapping[str, object]) -> str:
        try:
            process = self._idle.get(timeout=_WAIT_S)
        except queue.Empty:
            raise ResourceExhaustedError("other chats take long to render", retry_after_s=_RETRY_AFTER_S) from None
        try:
            if process is not None and not process.is_alive:  # ended by the system: not this chat's fault
                self._forget(process)
                process = None
            process = process or self._make()
            return process.render(variables)
        finally:
            self._put_back(process)

    def close(self) -> None:
        with self._lock:
            for process in self._all:
                process.close()

    def _make(self) -> TemplateProcess:
        process = TemplateProcess(self._source, MAX_RENDERED_CHARS)
        with self._lock:
            self._all.add(process)
        return process

    def _put_back(self, process: TemplateProcess | None) -> None:
        if process is not None and not process.is_alive:
            self._forget(process)
            process = None
        self._idle.put(process)

    def _forget(self, process: TemplateProcess) -> None:
        process.close()
        with self._lock:
            self._all.discard(process)
