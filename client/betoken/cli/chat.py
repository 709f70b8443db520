"""`betoken chat`: a conversation in the terminal, with a running router or with services started for it.

Without a terminal the questions are the lines of standard input, and the output is the whole conversation.
"""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from betoken.cli import connection as c
from betoken.cli import provenance, report, starting
from betoken.cli.up import services_config
from betoken.cli.up_options import UpOptions
from betoken.client import BetokenError, ChatMessage, Client, Generation, RequestCancelledError, Sampling

EXIT_COMMAND = "/exit"
_PROMPT = "> "
_MODEL = "Services started for the chat"
_SAMPLING = "Sampling (default: the model's)"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(c.Connection):
    """The values of the options."""

    system: Annotated[str | None, typer.Option(help="System message at the beginning of the conversation.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to serve for this chat: GGUF file, directory, hub id, or OWNER/NAME:Q4_K_M, a GGUF file of the"
            " hub; default: the router at --address answers.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model for --model, named likewise.", rich_help_panel=_MODEL),
    ] = None
    compile: Annotated[str, typer.Option(envvar="BETOKEN_COMPILE", help="auto, on or off.", rich_help_panel=_MODEL)] = (
        "auto"
    )
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.", rich_help_panel=_SAMPLING)] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of every answer; same seed, same tokens.", rich_help_panel=_SAMPLING)
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer.", rich_help_panel=_SAMPLING)
    ] = None
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Deadline of an answer, seconds.", rich_help_panel=c.PANEL)
    ] = 600.0


def chat(options: ChatOptions) -> None:
    """Chat with a model: Ctrl-C stops an answer, /exit or Ctrl-D ends the chat."""
    if options.model is None:
        if options.draft is not None:
            raise typer.BadParameter("needs --model, whose services would use it", param_hint="--draft")
        _chat(options)
        return
    with _served(options) as address:
        _chat(replace(options, address=address))


@contextmanager
def _served(options: ChatOptions) -> Iterator[str]:
    """Address of a router that serves `options.model` until the end of the chat."""
    starting.check_can_start("chat --model")
    console = Console(stderr=True)
    local = UpOptions(target=options.model, draft=options.draft, compile=options.compile, port=0, no_gateway=True)
    try:
        config = services_config(local, console)
    except typer.BadParameter as error:
        error.param_hint = "--model" if error.param_hint == "--target" else error.param_hint
        raise
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    services = starting.started(config, console)
    try:
        yield services.address
    finally:
        starting.stop(services, console)


def _chat(options: ChatOptions) -> None:
    with c.reported_errors(options, as_json=False), options.client() as client:
        info = client.model_info()
        if not info.has_chat_template:
            sys.stderr.write(f"betoken: {info.model} has no chat template; `betoken generate` completes text\n")
            raise typer.Exit(c.EXIT_FAILED)
        sampling = Sampling(temperature=options.temperature, seed=options.seed, max_new_tokens=options.max_new_tokens)
        console = Console()
        view = _View(console, provenance.Provenance(console, info.sources))
        if view.is_dialogue:
            console.print(f"{info.model}: Ctrl-C stops an answer, {EXIT_COMMAND} or Ctrl-D ends the chat", markup=False)
        # On a terminal Ctrl-C right after an answer does nothing, so that it cannot end the chat by chance.
        with _on_interrupt(_ignore) if view.is_dialogue else nullcontext():
            Conversation(client, sampling, view, options.system).run()


class _View:
    """Input and output of a conversation: a dialogue on a terminal, else lines."""

    def __init__(self, console: Console, shown: provenance.Provenance) -> None:
        self._console, self._shown = console, shown
        self.is_dialogue = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_dialogue:
            with suppress(ImportError):
                import readline  # noqa: F401 (the prompt then has a history and can be edited)
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")

    def questions(self) -> Iterator[str]:
        """Yield non-empty lines until `/exit` or the end of the input. On a terminal Ctrl-C clears the line."""
        while True:
            try:
                line = self._typed_line() if self.is_dialogue else self._next_line()
            except EOFError:
                if self.is_dialogue:
                    print()
                return
            except KeyboardInterrupt:
                if not self.is_dialogue:
                    raise
                print()
                continue
            if line.strip() == EXIT_COMMAND:
                return
            if line.strip():
                if not self.is_dialogue:
                    print(f"{_PROMPT}{line}", flush=True)
                yield line

    def _typed_line(self) -> str:
        with _on_interrupt(signal.default_int_handler):
            return input(_PROMPT)

    def _next_line(self) -> str:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"standard input is not text: {error}", param_hint="stdin") from None
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def stream(self, generation: Generation) -> Iterator[str]:
        """Write the pieces of an answer as they arrive, and yield their texts."""
        for piece in generation:
            if sys.stdout.isatty():
                self._shown.show(piece)
            else:
                print(piece.text, end="", flush=True)
            yield piece.text

    def end(self, note: str) -> None:
        """End an answer, on a terminal with a note about it."""
        print("\n")
        if self.is_dialogue:
            self._console.print(note, style="dim", markup=False, highlight=False)


class Conversation:
    """The messages so far, and the answers of a router to them."""

    def __init__(self, client: Client, sampling: Sampling, view: _View, system: str | None = None) -> None:
        self._client, self._sampling, self._view = client, sampling, view
        self.messages = [] if system is None else [ChatMessage(role="system", content=system)]

    def run(self) -> None:
        """Answer every question.

        Raises:
            BetokenError: a question of a pipe cannot be answered. On a terminal the error is shown instead.
        """
        for question in self._view.questions():
            self._answer(question)

    def _answer(self, question: str) -> None:
        """Answer one question. The half of a stopped answer stays in the conversation."""
        messages = [*self.messages, ChatMessage(role="user", content=question)]
        generation = self._client.generate(messages, sampling=self._sampling)
        texts: list[str] = []
        start = time.monotonic()
        try:
            with _on_interrupt(_canceller(generation)):
                for text in self._view.stream(generation):
                    texts.append(text)
            completion = generation.result()
            speed = report.tokens_per_s(completion, time.monotonic() - start)
            is_cut = completion.finish_reason == "length"
            note = f"{len(completion.tokens)} tokens{', the limit' if is_cut else ''}; {speed:.1f} tokens/s"
        except RequestCancelledError:
            note = "stopped"
        except BetokenError as error:
            if not self._view.is_dialogue:
                raise
            note = f"{error.code.name}: {c.in_options(error)}"
        self._view.end(note)
        if text := "".join(texts):
            self.messages = [*messages, ChatMessage(role="assistant", content=text)]


@contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle Ctrl-C by `handler`."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _canceller(generation: Generation) -> Callable[[int, FrameType | None], None]:
    """Handler that cancels the answer; pressed again before it has ended, Ctrl-C ends the command."""

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    return cancel


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
