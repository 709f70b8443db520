"""Renders chat messages through a model's Jinja template, in separate processes with limited memory and time.

A template is somebody else's program: whatever it raises, and whatever it takes, is the request's fault, not ours.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping

from betoken.common.errors import InvalidArgumentError, ResourceExhaustedError
from betoken.router.text.chat import Chat
from betoken.router.text.template_process import RenderingFailedError, TemplateProcess

MAX_RENDERED_CHARS = 1 << 25
NUM_PROCESSES = 2
"""Renderers that run at once; a slow chat leaves one for the others."""
_WAIT_S = 30.0
_RETRY_AFTER_S = 1.0
_MARK = "\ue000the last message goes on here\ue001 "
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")


class TemplateError(Exception):
    """The template does not compile."""


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Starts the first process.

        Raises:
            TemplateError: the template does not compile.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._processes = _Processes(source)
        weakref.finalize(self, self._processes.close)

    def render(self, chat: Chat) -> str:
        """The prompt's text, up to the start of the assistant's answer, or the end of the last message that it is to
        go on with. Blocks its thread.

        Raises:
            InvalidArgumentError: the template refuses these messages, takes too much for them, or lacks one of the
                other inputs. ResourceExhaustedError: other chats take too long.
        """
        self._check_known(chat)
        messages = [dict(message) for message in chat.messages]
        if chat.continues:
            messages[-1]["content"] += _MARK
        variables = {
            "documents": None,
            **chat.arguments,
            "messages": messages,
            "tools": list(chat.tools) or None,
            "add_generation_prompt": not chat.continues,
            **self._special_tokens,
        }
        try:
            text = self._processes.render(variables)
        except RenderingFailedError as error:
            roles = [message.get("role", "") for message in messages]
            raise InvalidArgumentError("messages", roles, f"refused by the model's chat template: {error}") from error
        return _up_to_mark(text) if chat.continues else text

    def _check_known(self, chat: Chat) -> None:
        """Inputs that a template would ignore are refused."""
        names = self._processes.names
        if chat.tools and "tools" not in names:
            count = f"{len(chat.tools)} tools"
            raise InvalidArgumentError("messages.tools", count, "the model's chat template knows none")
        for name in chat.arguments:
            field = f"messages.template_arguments.{name}"
            if name in _OWN_VARIABLES or name in self._special_tokens:
                raise InvalidArgumentError(field, "set", "is this service's to set")
            if name not in names:
                raise InvalidArgumentError(field, "set", "the model's chat template knows no such argument")

    @staticmethod
    def missing() -> InvalidArgumentError:
        """The error for chat messages to a model without a template."""
        return InvalidArgumentError("messages", "set", "the model has no chat template; send prompt or prompt_ids")


def _up_to_mark(text: str) -> str:
    """`text` up to the mark after the last message's content; without the spaces before it if the template has stripped
    those after it, as transformers does."""
    end = text.rfind(_MARK.strip())
    if end < 0:
        limit = "the template changes the last message"
        raise InvalidArgumentError("messages.continue_final_message", True, limit)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


class _Processes:
    """The processes of one template; each is made when it is needed first, and again once it was ended."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            first = TemplateProcess(source, MAX_RENDERED_CHARS)
        except RenderingFailedError as error:
            raise TemplateError(str(error)) from error
        self.names = first.names
        """Variables that the template asks for."""
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
        process = TemplateProcess(self.source, MAX_RENDERED_CHARS)
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
