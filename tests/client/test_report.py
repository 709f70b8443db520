"""The coloured answer, its legend and its table of statistics in a terminal."""

import os
import pty
import select
import signal
import sys
import time
from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console
from rich.style import Style

from betoken.cli import provenance, report
from betoken.client import (
    Completion,
    Piece,
    SourceInfo,
)
from betoken.drafters.registry import SPECS
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2
from tests.client.command import ACCEPTED, STATS, start

SOURCES = (
    SourceInfo("model", "accepted from the draft model", "green"),
    SourceInfo("ngram", "accepted from prompt lookup", "cyan"),
)


MODEL_SOURCE = types_pb2.SourceInfo(name="model", explains="accepted from the draft model", colour="green")


def test_tokens_are_coloured_and_control_characters_shown(script) -> None:
    console = Console(force_terminal=True, file=StringIO(), color_system="standard", width=80)
    piece = Piece.from_proto(script.tokens("a\x1b[2J\n", 5, **ACCEPTED).tokens)
    recovered = Piece.from_proto(script.tokens("b" * 200, 6, origin=types_pb2.TOKEN_ORIGIN_RECOVERED).tokens)
    shown = provenance.Provenance(console, SOURCES)
    for part in (piece, recovered):
        shown.show(part)
    console.print(shown.legend([*piece.tokens, *recovered.tokens]))
    output = console.file.getvalue()
    assert "\x1b[32ma␛[2J\x1b[0m\n" in output and "\x1b[33m" + "b" * 200 in output
    assert "50% \x1b[32mmodel" in output and "50% \x1b[33mrecovered" in output and "bonus" not in output


def luminance(red: int, green: int, blue: int) -> float:
    linear = [((c / 255 + 0.055) / 1.055) ** 2.4 if c / 255 > 0.04045 else c / 255 / 12.92 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


SOLARIZED = {
    "black": (7, 54, 66),
    "red": (220, 50, 47),
    "green": (133, 153, 0),
    "yellow": (181, 137, 0),
    "blue": (38, 139, 210),
    "magenta": (211, 54, 130),
    "cyan": (42, 161, 152),
    "white": (238, 232, 213),
    "bright_black": (0, 43, 54),
    "bright_red": (203, 75, 22),
    "bright_green": (88, 110, 117),
    "bright_yellow": (101, 123, 131),
    "bright_blue": (131, 148, 150),
    "bright_magenta": (108, 113, 196),
    "bright_cyan": (147, 161, 161),
    "bright_white": (253, 246, 227),
}


def styles_of(console: Console) -> list[str]:
    """How every origin and every source of the project's own drafters is shown."""
    sources = [SourceInfo(spec.name, spec.explains, spec.colour) for spec in SPECS.values() if spec.explains]
    shown = provenance.Provenance(console, [*sources, SourceInfo("a.b:C", "accepted from the plug-in a.b:C", "")])
    names = [*(source.name for source in sources), "a.b:C", "recovered", "bonus", "plain", "unknown"]
    return [shown.style(name) for name in names]


@pytest.mark.parametrize("background", [(0, 43, 54), (253, 246, 227)], ids=["dark", "light"])
def test_every_provenance_colour_is_readable_and_distinct_on_solarized(background: tuple[int, int, int]) -> None:
    console = Console(force_terminal=True, color_system="standard", no_color=False)
    known = styles_of(console)
    assert len(set(known)) == len(known)
    for style in map(Style.parse, known):
        if style.color is not None:
            lights = sorted((luminance(*background), luminance(*SOLARIZED[style.color.name])))
            assert (lights[1] + 0.05) / (lights[0] + 0.05) > 2.5, style


def test_without_colours_the_legend_still_names_each_provenance(script) -> None:
    console = Console(force_terminal=True, file=StringIO(), color_system="standard", no_color=True, width=80)
    known = styles_of(console)
    assert len(set(known)) == len(known)
    piece = Piece.from_proto(script.tokens("a", 5, **ACCEPTED).tokens)
    recovered = Piece.from_proto(script.tokens("b", 6, origin=types_pb2.TOKEN_ORIGIN_RECOVERED).tokens)
    shown = provenance.Provenance(console, SOURCES)
    for part in (piece, recovered):
        shown.show(part)
    console.print(shown.legend([*piece.tokens, *recovered.tokens]))
    output = console.file.getvalue()
    assert "\x1b[1ma\x1b[0m" in output and "\x1b[4mb\x1b[0m" in output and "\x1b[3" not in output
    assert "50% \x1b[1mmodel\x1b[0m" in output and "50% \x1b[4mrecovered\x1b[0m" in output


def test_the_table_of_statistics_names_speed_and_acceptance() -> None:
    finish = pb.GenerateFinish(reason=pb.FINISH_REASON_STOP, stop="\n", speculation=STATS)
    completion = Completion.from_proto(pb.GenerateStart(), [], finish, 0)
    console = Console(file=StringIO(), width=100)
    console.print(report.table(completion, 0.5))
    output = console.file.getvalue()
    for words in ("tokens/s", "2.00 of 4.0 drafted", "█ 100%", "3.00 tokens per target forward", "stop string '\\n'"):
        assert words in output


def test_the_table_of_statistics_shows_the_drafts_begun_ahead() -> None:
    stats = pb.SpeculationStats(num_ahead_hits=3, num_ahead_misses=1, num_ahead_tokens=40, num_used_ahead_tokens=12)
    finish = pb.GenerateFinish(reason=pb.FINISH_REASON_STOP, speculation=stats)
    completion = Completion.from_proto(pb.GenerateStart(), [], finish, 0)
    console = Console(file=StringIO(), width=100)
    console.print(report.table(completion, 0.5))
    assert "3 of 4 drafts, 12 of 40 tokens used" in console.file.getvalue()
    assert completion.speculation.ahead_hit_rate == 0.75


def test_a_seed_stays_whole_in_a_narrow_terminal() -> None:
    completion = Completion.from_proto(pb.GenerateStart(seed=12345678901234567890), [], pb.GenerateFinish(), 0)
    console = Console(file=StringIO(), width=30)
    console.print(report.table(completion, 0.5))
    assert "12345678901234567890" in "".join(console.file.getvalue().split("seed")[1].split())


def test_a_stop_string_that_looks_like_markup_is_shown_as_it_is() -> None:
    finish = pb.GenerateFinish(reason=pb.FINISH_REASON_STOP, stop="[/INST]")
    console = Console(file=StringIO(), width=100)
    console.print(report.table(Completion.from_proto(pb.GenerateStart(), [], finish, 0), 0.5))
    assert "ended by the stop string '[/INST]'" in console.file.getvalue()


@pytest.mark.parametrize(
    ("mode", "note"),
    [
        (types_pb2.VERIFICATION_MODE_COUPLED, None),
        (types_pb2.VERIFICATION_MODE_REJECTION, "rejection: the target's distribution"),
        (types_pb2.VERIFICATION_MODE_TYPICAL, "typical: lossy"),
    ],
)
def test_the_table_of_statistics_states_the_limits_of_a_mode(mode: int, note: str | None) -> None:
    completion = Completion.from_proto(pb.GenerateStart(mode=mode), [], pb.GenerateFinish(), 0)
    console = Console(file=StringIO(), width=100)
    console.print(report.table(completion, 0.5))
    assert (note or "tokens/s") in console.file.getvalue()
    assert ("verification" in console.file.getvalue()) == (note is not None)


def test_a_terminal_gets_colours_and_an_interrupt_cancels(router, script) -> None:
    router.will(pb.GetModelInfoResponse(model="tiny"))  # whether to use a chat template
    router.will(pb.GetModelInfoResponse(model="tiny", sources=[MODEL_SOURCE]))
    router.will(script.start(), script.tokens("green", 5, **ACCEPTED), script.Hang())
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("NO_COLOR", None)
    command = start(["generate", "hi", "--address", router.address], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    deadline = time.monotonic() + 60
    while b"green" not in output and time.monotonic() < deadline:
        if select.select([ours], [], [], 1.0)[0]:
            output += os.read(ours, 1024)
    command.send_signal(signal.SIGINT)
    status = command.wait(60)
    with suppress(OSError):  # a terminal's end, once all it was sent has been read
        while chunk := os.read(ours, 1024):
            output += chunk
    assert (status, b"\x1b[32mgreen" in output, b"cancelled" in output) == (130, True, True), output
    assert router.cancelled.wait(30)
    os.close(ours)
