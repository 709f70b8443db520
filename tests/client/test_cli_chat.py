"""`betoken chat` against a scripted router: turns, Ctrl-C, the end, pipes and terminals."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from betoken.cli.main import app
from betoken.client import InvalidArgumentError
from betoken.v1 import generation_pb2 as pb
from tests.client.command import start

INFO = pb.GetModelInfoResponse(model="tiny", has_chat_template=True)


def conversation_of(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages.messages]


def run(*arguments: str, **options):
    return CliRunner().invoke(app, ["chat", *arguments], **options)


def test_a_chat_sends_the_turns_before_with_each_question(router, script) -> None:
    router.will(INFO)
    router.will(script.start(), script.tokens("ab", 5), script.tokens("c", 6), script.finish(2))
    router.will(script.start(), script.tokens("d", 7), script.finish(1))
    result = run("--address", router.address, "--system", "be brief", "--seed", "3", input="hi\n\nand\r\n/exit\nx\n")
    assert (result.exit_code, result.stdout) == (0, "> hi\nabc\n\n> and\nd\n\n")
    first, second = router.requests[1:]
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "abc"), ("user", "and")]
    assert conversation_of(first) == turns[:2] and conversation_of(second) == turns
    assert second.sampling.seed == 3 and not second.sampling.HasField("max_new_tokens")


def test_a_chat_with_a_model_without_a_template_is_refused(router) -> None:
    router.will(pb.GetModelInfoResponse(model="coder"))
    result = run("--address", router.address, input="hi\n")
    assert result.exit_code == 1 and "coder has no chat template" in result.stderr


def test_a_piped_question_that_cannot_be_answered_ends_the_chat(router) -> None:
    router.will(INFO)
    router.will(InvalidArgumentError("messages", "", "must be shorter"))
    result = run("--address", router.address, input="hi\nnext\n")
    assert result.exit_code == 1 and "must be shorter" in result.stderr and "> next" not in result.stdout


def test_a_draft_model_of_a_chat_needs_a_model() -> None:
    result = run("--draft", "d", input="")
    assert result.exit_code == 2 and "--draft" in result.stderr


def test_a_model_of_a_chat_that_does_not_exist_is_named_by_its_option(tmp_path: Path) -> None:
    result = run("--model", str(tmp_path / "absent.gguf"), input="", env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "--model" in result.stderr and "absent.gguf" in result.stderr


def test_a_chat_stops_the_services_that_it_started(fake_modules: Path) -> None:
    chat = start(["chat", "--model", "t"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = chat.communicate("", timeout=60)  # the model of the fake services has no chat template
    assert chat.returncode == 1 and "fake has no chat template" in said and "stopping" in said


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, address: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "betoken.cli", "chat", "--address", address]
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "80"}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **ends)
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + 60
        while self.shown.count(text) < count:
            assert time.monotonic() < deadline, self.shown
            self._read(1.0)

    def _read(self, timeout_s: float) -> None:
        if select.select([self._ours], [], [], timeout_s)[0]:
            self.shown += os.read(self._ours, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt_prompt(self) -> None:
        """Send SIGINT and wait for a new prompt. A signal between readline's prompt and its wait is handled after the
        next line, so that an empty line follows if none appears."""
        prompts, deadline = self.shown.count("> "), time.monotonic() + 60
        self.process.send_signal(signal.SIGINT)
        while self.shown.count("> ") == prompts:
            assert time.monotonic() < deadline, self.shown
            self._read(2.0)
            if self.shown.count("> ") == prompts:
                self.type("\n")

    def exit(self) -> int:
        """Type the exit command until the chat ends, since a prompt that just appears may lose a line; its status."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            self.type("/exit\n")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(router):
    router.will(INFO)
    terminal = Terminal(router.address)
    terminal.wait_for("> ")
    yield terminal
    terminal.close()


def test_an_interrupt_stops_an_answer_and_keeps_its_half_in_the_chat(router, script, terminal: Terminal) -> None:
    router.will(script.start(), script.tokens("half", 5), script.Hang())
    terminal.type("hi\n")
    terminal.wait_for("half")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped")
    router.will(script.start(), script.tokens("whole", 6), script.finish(1))
    terminal.type("go on\n")
    terminal.wait_for("1 tokens, the limit")
    assert conversation_of(router.requests[-1]) == [("user", "hi"), ("assistant", "half"), ("user", "go on")]
    terminal.wait_for("> ", count=3)  # before it a terminal loses the end of the input
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


def test_an_error_on_a_terminal_is_shown_and_the_chat_goes_on(router, script, terminal: Terminal) -> None:
    router.will(InvalidArgumentError("messages", "", "must leave room for an answer"))
    terminal.type("too long\n")
    terminal.wait_for("must leave room for an answer")
    router.will(script.start(), script.tokens("whole", 6), script.finish(1))
    terminal.type("hi\n")
    terminal.wait_for("tokens/s")
    assert conversation_of(router.requests[-1]) == [("user", "hi")]
    terminal.wait_for("> ", count=3)
    terminal.interrupt_prompt()
    assert terminal.exit() == 0
    assert not re.search("Traceback|cancelled", terminal.shown)
