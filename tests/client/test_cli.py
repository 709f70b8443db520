"""The `betoken` command against a scripted router, and `up` with tiny services."""

import errno
import importlib.util
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import fields
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, get_args, get_type_hints

import grpc
import pytest
import typer
from rich.console import Console
from rich.style import Style
from typer.testing import CliRunner

from betoken.cli import provenance, report, services
from betoken.cli.connection import in_options, option_of
from betoken.cli.generate_form import GenerateForm
from betoken.cli.info import _console, _worker_table
from betoken.cli.main import app
from betoken.cli.service_process import Progress
from betoken.cli.starting import shown_progress
from betoken.cli.up_form import up_form
from betoken.cli.up_options import checked_port
from betoken.client import (
    Completion,
    InternalError,
    InvalidArgumentError,
    Piece,
    Sampling,
    SourceInfo,
    Speculation,
    WorkerStatus,
)
from betoken.client.channel import DEFAULT_ADDRESS
from betoken.common.release import how_to_install
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.registry import SPECS
from betoken.router.access.keys import Keys
from betoken.router.settings import RouterSettings
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.client.command import start

ROOT = Path(__file__).parents[2]
SOURCES = (
    SourceInfo("model", "accepted from the draft model", "green"),
    SourceInfo("ngram", "accepted from prompt lookup", "cyan"),
)
MODEL_SOURCE = types_pb2.SourceInfo(name="model", explains="accepted from the draft model", colour="green")
ACCEPTED = {"origin": types_pb2.TOKEN_ORIGIN_ACCEPTED, "source": "model"}
STATS = pb.SpeculationStats(
    num_drafts=1,
    num_draft_tokens=4,
    num_accepted_tokens=2,
    num_accepted_per_position=[1, 1, 0, 0],
    num_drafted_per_position=[1, 1, 1, 1],
    num_verify_forwards=1,
    num_emitted_tokens=3,
    num_rounds=2,
    num_draft_forwards=5,
)
cli = CliRunner()


@pytest.fixture
def answering(router, script):
    router.will(
        script.start(seed=5, mode=types_pb2.VERIFICATION_MODE_TYPICAL),
        script.tokens("ab", 5, 6, **ACCEPTED),
        script.tokens("c", 7, origin=types_pb2.TOKEN_ORIGIN_RECOVERED),
        script.finish(3, speculation=STATS),
    )
    return router


def run(*arguments: str, **options):
    return cli.invoke(app, list(arguments), **options)


def test_text_alone_goes_into_a_pipe(answering) -> None:
    result = run("generate", "hi", "--address", answering.address)
    assert (result.exit_code, result.stdout) == (0, "abc\n")


def test_the_prompt_may_come_from_standard_input(answering) -> None:
    text = "from a pipe,\r\nline ends\rand all\n"
    result = run("generate", "--address", answering.address, input=text)
    assert result.exit_code == 0 and answering.requests[0].prompt == text


def test_standard_input_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class HungUp(BytesIO):  # a terminal that was closed
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdin", TextIOWrapper(HungUp()))
    with pytest.raises(typer.BadParameter, match="standard input cannot be read: .*Input/output error"):
        GenerateForm().question()


def test_bytes_that_are_no_text_are_refused_in_every_locale() -> None:
    for locale in ("C", "C.UTF-8"):
        environment = os.environ | {"LC_ALL": locale}
        command = [sys.executable, "-m", "betoken.cli", "generate", "--address", "127.0.0.1:1"]
        done = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environment, timeout=60)
        assert done.returncode == 2 and b"standard input is not text" in done.stderr


def test_what_a_locale_cannot_write_is_escaped(router, script) -> None:
    router.will(script.start(), script.tokens("caf\xe9", 5), script.finish(1))
    command = [sys.executable, "-m", "betoken.cli", "generate", "hi", "--address", router.address]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"caf\\xe9\n")


@pytest.mark.parametrize("command", ["generate hi", "generate hi --json", "info", "info --json"])
@pytest.mark.parametrize("is_pipe", [True, False], ids=["an unread pipe", "a full disk"])
def test_output_that_cannot_be_written_is_a_failure_reported_once(router, script, command: str, is_pipe: bool) -> None:
    answer = (script.start(), script.tokens("abc", 5), script.finish(1))
    router.will(*(answer if command.startswith("generate") else (pb.GetModelInfoResponse(model="tiny"),)))
    if is_pipe:
        read_end, output = os.pipe()
        os.close(read_end)
    else:
        output = os.open("/dev/full", os.O_WRONLY)
    arguments = [sys.executable, "-m", "betoken.cli", *command.split(), "--address", router.address]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(arguments, stdout=output, stderr=subprocess.PIPE, env=environment, timeout=60)
    os.close(output)
    reported = b"" if is_pipe else b"betoken: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, reported)


def test_json_is_one_object(answering) -> None:
    result = run("generate", "hi", "--json", "--address", answering.address)
    (line,) = result.stdout.splitlines()
    answer = json.loads(line)
    assert answer["text"] == "abc" and answer["output_ids"] == [5, 6, 7] and answer["seed"] == 5
    assert answer["tokens"][0] == {"id": 5, "text": "a", "origin": "accepted", "source": "model"}
    assert answer["mode"] == "typical"
    assert answer["finish_reason"] == "length" and answer["usage"]["output_tokens"] == 3
    assert answer["speculation"]["block_efficiency"] == 3 and answer["speculation"]["draft_forwards_per_round"] == 2.5
    assert answer["speculation"]["acceptance_rate"] == 0.5
    assert answer["speculation"]["acceptance_per_position"] == [1, 1, 0, 0]
    assert answer["tokens_per_s"] > 0 and answer["prompt_ids"] == [1, 2, 3]


def test_every_option_reaches_the_request(answering) -> None:
    options = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2"
    options += " --frequency-penalty 0.3 --logit-bias 4=-1.5 --logit-bias 5=2 --seed 18446744073709551615"
    options += " --max-new-tokens 9 --min-new-tokens 2 --stop x --stop y --stop-token-id 8 --ignore-eos --logprobs 2"
    options += " --prompt-logprobs 3"
    options += " --drafter ngram --drafter-setting max_ngram=4 --num-draft-tokens 6 --mode rejection"
    options += " --model tiny --tenant me --system be-brief"
    result = run("generate", "hi", "--address", answering.address, *options.split())
    assert result.exit_code == 0, result.output
    request = answering.requests[0]
    sampling = request.sampling
    assert all(sampling.HasField(field.name) for field in sampling.DESCRIPTOR.fields if not field.is_repeated)
    assert sampling.seed == 2**64 - 1 and list(sampling.stop) == ["x", "y"] and list(sampling.stop_token_ids) == [8]
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(4, -1.5), (5, 2)]
    speculation = request.speculation
    assert speculation.drafter.name == "ngram" and dict(speculation.drafter.settings) == {"max_ngram": "4"}
    assert (speculation.num_draft_tokens, speculation.off) == (6, False)
    assert speculation.mode == types_pb2.VERIFICATION_MODE_REJECTION
    assert (request.model, request.tenant) == ("tiny", "me")
    assert [(m.role, m.content) for m in request.messages.messages] == [("system", "be-brief"), ("user", "hi")]


def test_how_a_prompt_becomes_ids_reaches_the_request(answering) -> None:
    options = ("--address", answering.address, "--escape-special-tokens", "--begin", "Well,")
    assert run("generate", "hi", *options).exit_code == 0
    chat = answering.requests[0].messages
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi"), ("assistant", "Well,")]
    assert chat.continue_final_message and chat.escape_special_tokens


def test_a_text_without_special_tokens_reaches_the_request(answering) -> None:
    assert run("generate", "hi", "--address", answering.address, "--no-special-tokens").exit_code == 0
    request = answering.requests[0]
    assert request.HasField("add_special_tokens") and not request.add_special_tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--json-object", {"json_object": True}),
        ("--json-schema FILE", {"json_schema": "in the file"}),
        ("--regex a+", {"regex": "a+"}),
        ("--choice yes --choice no", {"choice": {"texts": ["yes", "no"]}}),
        ("--lark FILE", {"lark": "in the file"}),
    ],
)
def test_a_constraint_reaches_the_request(answering, tmp_path: Path, options: str, expected: Any) -> None:
    (tmp_path / "file").write_text("in the file")
    given = options.replace("FILE", str(tmp_path / "file")).split()
    assert run("generate", "hi", "--address", answering.address, *given).exit_code == 0
    assert answering.requests[0].constraint == types_pb2.Constraint(**expected)


def test_off_reaches_the_request(answering) -> None:
    assert run("generate", "hi", "--address", answering.address, "--off").exit_code == 0
    assert answering.requests[0].speculation.off


def test_prompt_ids_take_the_place_of_text(answering) -> None:
    assert run("generate", "--prompt-ids", "1,2 3", "--address", answering.address).exit_code == 0
    assert list(answering.requests[0].prompt_ids.ids) == [1, 2, 3]


def test_a_suffix_makes_the_prompt_of_generate_an_infill(answering) -> None:
    answering.has_chat_template = True
    assert run("generate", "a", "--suffix", "b", "--address", answering.address).exit_code == 0
    infill = answering.requests[0].infill
    assert (infill.prefix, infill.suffix) == ("a", "b")


@pytest.mark.parametrize(
    "options",
    [
        "--json-object --regex a",
        "--suffix b --system hi a",
        "--json-schema /no/such/file",
        "--logit-bias 4",
        "--logit-bias a=b",
        "--prompt-ids 1,x",
        "--prompt-ids 1 hi",
        "--mode guess",
        "--drafter-setting x",
        "--logit-bias 4=1 --logit-bias 04=2",
        "--drafter-setting max_ngram=4 --drafter-setting max_ngram=5",
        "--drafter ngram --off",
        "--drafter-setting max_ngram=4 --off",
        "--num-draft-tokens 0 --off",
    ],
)
def test_options_that_make_no_sense_are_refused_here(options: str) -> None:
    result = run("generate", *options.split())
    assert result.exit_code == 2 and options.split()[0] in result.stderr


def test_a_bias_without_a_value_is_reported_the_form_of_a_bias() -> None:
    assert "'4' is not ID=BIAS" in run("generate", "--logit-bias", "4").stderr


def test_what_the_router_refuses_is_reported_in_one_line(router) -> None:
    router.will(InvalidArgumentError("sampling.temperature", -1.0, "must be 0 or more"))
    result = run("generate", "hi", "--temperature", "-1", "--address", router.address)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("betoken: INVALID_ARGUMENT: --temperature = -1.0: must be 0 or more")


def test_what_the_router_refuses_is_json_for_machines(router) -> None:
    router.will(InvalidArgumentError("sampling.temperature", -1.0, "must be 0 or more"))
    result = run("generate", "hi", "--json", "--address", router.address)
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1
    assert (error["code"], error["field"], error["limit"]) == (
        "INVALID_ARGUMENT",
        "sampling.temperature",
        "must be 0 or more",
    )


def test_what_came_of_an_answer_that_broke_is_in_its_error(router, script) -> None:
    router.will(script.start(seed=9, system_fingerprint="f"), script.tokens("ab", 5, 6), InternalError("bug"))
    result = run("generate", "hi", "--json", "--address", router.address)
    partial = json.loads(result.stdout)["error"]["partial"]
    assert partial == {"text": "ab", "output_ids": [5, 6], "seed": 9, "system_fingerprint": "f"}


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("prompt", "PROMPT"),
        ("message", "PROMPT"),
        ("messages", "PROMPT"),
        ("messages[0].content", "PROMPT or --system"),
        ("messages.continue_final_message", "--begin"),
        ("messages.escape_special_tokens", "--escape-special-tokens"),
        ("escape_special_tokens", "--escape-special-tokens"),
        ("add_special_tokens", "--no-special-tokens"),
        ("messages[1].content", "PROMPT"),
        ("prompt_ids.ids[3]", "--prompt-ids"),
        ("infill", "--suffix"),
        ("sampling.stop_token_ids[1]", "--stop-token-id"),
        ("sampling.logit_bias[0].token_id", "--logit-bias"),
        ("speculation.drafter.name", "--drafter"),
        ("speculation.drafter.settings", "--drafter-setting"),
        ("speculation.drafter.settings.window", "--drafter-setting window"),
        ("constraint.json_schema", "--json-schema"),
        ("constraint.choice.texts[1]", "--choice"),
        ("tls.ca_file", "--tls-ca-file"),
        ("tls.server_name", "--tls-server-name"),
        ("timeout_s", "--timeout-s"),
        ("api_key", "--api-key-file, BETOKEN_API_KEY"),
        ("api_key_file", "--api-key-file"),
        ("address", "--address"),
    ],
)
def test_a_fault_names_the_option_that_the_value_came_from(field: str, option: str) -> None:
    assert in_options(InvalidArgumentError(field, 1, "must be 2")) == f"{option} = 1: must be 2"


def test_every_field_of_a_request_has_an_option_of_its_name() -> None:
    shown = run("generate", "--help", env={"COLUMNS": "200", "TERM": "dumb"}).output
    groups = {"sampling": Sampling, "speculation": Speculation}
    named = {"drafter": "drafter.name", "drafter_settings": "drafter.settings"}
    for group, kind in groups.items():
        for field in fields(kind):
            if field.name == "report_rounds":  # for programs: the command draws no rounds
                continue
            option = option_of(f"{group}.{named.get(field.name, field.name)}")
            assert re.search(rf"{option}\b(?!-)", shown), option


def test_up_names_its_own_options_of_the_connection() -> None:
    error = InvalidArgumentError("tls.ca_file", "x.pem", "must hold PEM")
    assert in_options(error, "--router-").startswith("--router-tls-ca-file = x.pem")


def test_what_routers_and_workers_say_moves_no_cursor(router) -> None:
    evil = "a\x1b[2J\r\nb"
    hello = types_pb2.WorkerHello(role="verify", model_id=evil, dtype=evil)
    worker = pb.WorkerInfo(address="a:1", state="refused", detail=evil, hello=hello)
    router.will(pb.GetModelInfoResponse(model=evil, drafters=[evil], verify_workers=[worker]))
    router.will(InternalError(evil))
    router.has_chat_template = None
    reported = [run("info", "--address", router.address) for _ in range(2)]
    assert "a:1 is refused: a\\x1b[2J\\r\\nb\n" in reported[0].stdout
    assert reported[1].stderr.startswith("betoken: INTERNAL: a\\x1b[2J\\r\\nb (")
    assert not {"\x1b", "\r"} & set(reported[0].stdout + reported[1].stderr)


def test_info_shows_workers_at_once_while_none_is_ready(router) -> None:
    worker = pb.WorkerInfo(address="a:1", state="connecting", detail="no handshake within 5.0 s")
    answer = pb.GetModelInfoResponse(verify_workers=[worker], version="1.2.3")
    router.will(answer)
    result = run("info", "--address", router.address)
    assert router.requests[0].at_once
    assert result.exit_code == 0 and "no verify worker has been met yet" in result.stdout
    assert "a:1 is connecting: no handshake within 5.0 s\n" in result.stdout and "1.2.3" in result.stdout
    router.will(answer)
    reported = json.loads(run("info", "--json", "--address", router.address).stdout)
    assert (reported["model"], reported["verify_workers"][0]["state"]) == ("", "connecting")


def test_info_shows_the_model_and_its_workers(router) -> None:
    hello = types_pb2.WorkerHello(role="verify", model_id="tiny", step_costs=[{"rows": 1, "context": 512, "ns": 10**6}])
    hello.drafters.append("ngram")
    workers = [
        pb.WorkerInfo(address="a:1", state="ready", hello=hello, load={"free_pages": 3, "total_pages": 9}),
        pb.WorkerInfo(address="[fd00::5]:2", state="refused", detail="tokenizers [differ]"),
    ]
    answer = pb.GetModelInfoResponse(
        model="tiny", drafters=["model", "ngram"], default_drafter="model", verify_workers=workers
    )
    router.will(answer)
    result = run("info", "--address", router.address)
    assert result.exit_code == 0 and "tiny" in result.stdout and "model, ngram (attached)" in result.stdout
    assert "[fd00::5]:2 is refused: tokenizers [differ]\n" in result.stdout
    assert result.stdout.count("[fd00::5]:2") == 2
    router.will(answer)
    info = json.loads(run("info", "--json", "--address", router.address).stdout)
    assert info["model"] == "tiny" and info["verify_workers"][0]["free_pages"] == 3


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_commands_send_the_callers_key(
    router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    file = tmp_path / "key"
    file.write_text("k\n")
    monkeypatch.setenv("BETOKEN_API_KEY", "k" if source == "environment" else "another")
    router.will(pb.GetModelInfoResponse(model="tiny"))
    options = ["--api-key-file", str(file)] if source == "file" else []
    result = cli.invoke(app, ["info", "--json", "--address", router.address, *options])
    assert result.exit_code == 0
    assert router.metadata[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize("content", [None, b"", b"two keys", b"\xff"])
def test_a_file_without_a_key_is_refused_in_one_line(router, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    result = cli.invoke(app, ["info", "--address", router.address, "--api-key-file", str(file)])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "--api-key-file" in result.stderr


def test_a_new_key_is_let_in_by_its_entry(tmp_path: Path) -> None:
    result = cli.invoke(app, ["new-key", "alice", "--tenant", "team"])
    file = tmp_path / "keys.toml"
    file.write_text(result.stdout)
    key = result.stderr.split()[-1]
    caller = Keys(file).caller([("authorization", f"Bearer {key}")])
    assert caller.tenant_of("") == "team"
    assert key not in result.stdout
    assert cli.invoke(app, ["new-key", "a\nb"]).exit_code == 2


def test_a_new_key_as_json_is_let_in_by_its_entry(tmp_path: Path) -> None:
    result = cli.invoke(app, ["new-key", "alice", "--json"])
    made = json.loads(result.stdout)
    (tmp_path / "keys.toml").write_text(made["entry"])
    caller = Keys(tmp_path / "keys.toml").caller([("authorization", f"Bearer {made['key']}")])
    assert caller.tenant_of("") == made["tenant"] == made["name"] == "alice"
    assert made["hash"] in made["entry"] and not result.stderr


def test_names_that_look_like_markup_are_shown_as_they_are(router) -> None:
    hello = types_pb2.WorkerHello(role="verify", model_id="llama[fp16]")
    workers = [pb.WorkerInfo(address="a:1", state="ready", hello=hello)]
    router.will(pb.GetModelInfoResponse(model="models/[old]/llama[fp16]", verify_workers=workers))
    result = run("info", "--address", router.address)
    assert result.exit_code == 0 and "models/[old]/llama[fp16]" in result.stdout
    assert result.stdout.count("llama[fp16]") == 2


@pytest.mark.parametrize("width", [90, 80, 76, 60, 20])
def test_numbers_stay_whole_in_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [
        WorkerStatus.from_proto(
            pb.WorkerInfo(
                address=f"unix:/srv/betoken-abcdefgh/{role}.sock",
                state="ready",
                hello=types_pb2.WorkerHello(
                    role=role,
                    model_id="models/target",
                    dtype="bfloat16",
                    step_costs=[{"rows": 1, "ns": 25_300_000}, {"rows": 8, "ns": 121_900_000}],
                ),
                load={"running": 128, "free_pages": 16384, "total_pages": 16384},
            ),
            role,
        )
        for role in ("verify", "draft")
    ]
    workers.append(WorkerStatus.from_proto(pb.WorkerInfo(address="127.0.0.1:50052", state="connecting"), "draft"))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console = Console(file=StringIO(), width=_console().width)
    console.print(_worker_table(workers))
    output = console.file.getvalue()
    for whole in ("16384/16384", "25.3, 121.9", " 128 ", "verify ", "connecting "):
        assert whole in output, output


def test_a_router_that_is_not_there_is_reported() -> None:
    result = run("info", "--address", "127.0.0.1:1", "--timeout-s", "1")
    assert result.exit_code == 1 and result.stderr.startswith("betoken: ")


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
def test_every_provenance_can_be_read_and_distinguished_on_solarized(background: tuple[int, int, int]) -> None:
    console = Console(force_terminal=True, color_system="standard", no_color=False)
    known = styles_of(console)
    assert len(set(known)) == len(known)
    for style in map(Style.parse, known):
        if style.color is not None:
            lights = sorted((luminance(*background), luminance(*SOLARIZED[style.color.name])))
            assert (lights[1] + 0.05) / (lights[0] + 0.05) > 2.5, style


def test_without_colours_the_legend_still_shows_which_is_which(script) -> None:
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


def test_the_table_names_speed_and_acceptance() -> None:
    finish = pb.GenerateFinish(reason=pb.FINISH_REASON_STOP, stop="\n", speculation=STATS)
    completion = Completion.from_proto(pb.GenerateStart(), [], finish, 0)
    console = Console(file=StringIO(), width=100)
    console.print(report.table(completion, 0.5))
    output = console.file.getvalue()
    for words in ("tokens/s", "2.00 of 4.0 drafted", "█ 100%", "3.00 tokens per target forward", "stop string '\\n'"):
        assert words in output


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
def test_the_table_says_what_a_mode_does_not_promise(mode: int, note: str | None) -> None:
    completion = Completion.from_proto(pb.GenerateStart(mode=mode), [], pb.GenerateFinish(), 0)
    console = Console(file=StringIO(), width=100)
    console.print(report.table(completion, 0.5))
    assert (note or "tokens/s") in console.file.getvalue()
    assert ("verification" in console.file.getvalue()) == (note is not None)


def test_services_are_replaced_by_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *everything: executed.append(everything))
    services.become("betoken.router", ["--help"], extra="router", needs=())
    program, arguments, environment = executed[0]
    assert program == sys.executable and arguments[1:] == ["-m", "betoken.router", "--help"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GRPC_EXPERIMENTS"] == "-event_engine_client,-event_engine_listener"
    with pytest.raises(typer.Exit):
        services.become("betoken.router", [], extra="router", needs=("no_such_package",))


def test_a_service_asks_for_nothing_that_its_extra_does_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(services, "become", lambda module, arguments, **options: asked.append(options))
    for command in ("router", "draft-worker", "verify-worker"):
        assert run(command).exit_code == 0
    assert [options["extra"] for options in asked] == ["router", "router", "worker"], "n-grams need no torch"
    for options in asked:
        installed = {re.split(r"[>=;]", line)[0].replace("-", "_") for line in extras[options["extra"]]}
        code, *packages = options["needs"]
        assert importlib.util.find_spec(code) and installed.issuperset(packages), options


def test_a_router_started_without_options_is_found_without_options() -> None:
    assert DEFAULT_ADDRESS == f"127.0.0.1:{RouterSettings.model_fields['port'].default}"


def test_every_argument_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(services, "become", lambda module, arguments, **_: became.append([module, *arguments]))
    for command, module in (("router", "router"), ("draft-worker", "draft_worker"), ("verify-worker", "verify_worker")):
        assert run(command, "--model", "x", "--help", "y").exit_code == 0
        assert became.pop() == [f"betoken.{module}", "--model", "x", "--help", "y"]


def test_a_router_without_tls_is_reported_in_one_line(router) -> None:
    command = [sys.executable, "-m", "betoken.cli", "info", "--tls", "--address", router.address, "--timeout-s", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("betoken: ")


def test_a_command_without_its_extra_says_so_in_one_line() -> None:
    code = "import sys\nsys.modules['typer'] = None\nsys.argv[1:] = ['router', '--help']\n"
    code += "from betoken.cli.__main__ import main\nraise SystemExit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    reported = (
        "betoken: the command needs typer: in a checkout of Betoken, pip install -c constraints.txt -e '.[cli]'\n"
    )
    assert (done.returncode, done.stderr) == (1, reported)


def test_an_interrupt_during_imports_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from betoken.cli.__main__ import main\nraise SystemExit(main())"
    roots = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": roots}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_up_serves_until_interrupted(fake_modules: Path, interruption: signal.Signals) -> None:
    arguments = ["up", "--target", "t", "--port", "0", "--log-directory", str(fake_modules), "--verify-options=--held"]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert any("verify: warming up (50%)" in line for line in iter(up.stderr.readline, ""))
    (fake_modules / "go").touch()
    address = up.stdout.readline().strip()
    assert run("info", "--address", address).exit_code == 0
    up.send_signal(interruption)
    _, errors = up.communicate(timeout=60)
    assert up.returncode == 0
    assert f"router    {address}" in errors
    with pytest.raises(grpc.FutureTimeoutError), grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(0.2)


@pytest.mark.parametrize("is_up", [False, True])
def test_up_leaves_nothing_behind_however_often_it_is_interrupted(
    fake_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    stubborn = [f"--{role}-options=--stubborn" for role in ("verify", "draft", "router")]
    up = start(["up", "--target", "t", "--port", "0", *stubborn], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    (up.stdout if is_up else up.stderr).readline()
    while up.poll() is None:
        up.send_signal(signal.SIGINT)
        time.sleep(0.01)
    up.communicate(timeout=60)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_up_stops_all_services_in_order_when_its_output_is_not_read(
    fake_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: signal.Signals
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    up = start(["up", "--target", "t", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    up.stdout.readline()
    up.stderr.close()  # as of a `tee` that the same Ctrl-C has ended, or of a terminal that was closed
    up.send_signal(interruption)
    status = up.wait(60)
    assert (list((tmp_path / "temporary").iterdir()), status) == ([], 0)


def lines_until(stream, reported: str) -> list[str]:
    lines = [stream.readline()]
    while reported not in lines[-1]:
        lines.append(stream.readline())
        assert lines[-1], lines
    return lines


def pid_of(directory: Path, name: str) -> int:
    return int(json.loads((directory / f"{name}.ready").read_text())["pid"])


def test_up_starts_again_whatever_ended(fake_modules: Path) -> None:
    arguments = ["up", "--target", "t", "--drafters", "ngram", "--port", "0", "--num-verify-workers", "2"]
    up = start([*arguments, "--log-directory", str(fake_modules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    address = up.stdout.readline().strip()
    for name in ("draft", "verify-2", "router"):
        os.kill(pid_of(fake_modules, name), signal.SIGKILL)
        lines = lines_until(up.stderr, f"{name} serves again")
        assert any(f"{name} was ended by SIGKILL" in line for line in lines), lines
        assert str(pid_of(fake_modules, name)) in lines[-1]
    assert run("info", "--address", address).exit_code == 0
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 0


def test_up_continues_without_a_stopped_service_while_there_is_a_verify_worker(fake_modules: Path) -> None:
    polite = [f"--{role}-options=--polite" for role in ("verify", "draft")]
    options = ["--drafters", "ngram", "--num-verify-workers", "2", *polite]
    arguments = ["up", "--target", "t", "--port", "0", *options]
    up = start([*arguments, "--log-directory", str(fake_modules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    up.stdout.readline()
    for name in ("draft", "verify-1", "verify-2"):
        os.kill(pid_of(fake_modules, name), signal.SIGTERM)
        lines_until(up.stderr, f"{name} was stopped: it is not started again")
    lines_until(up.stderr, "stopping")
    up.communicate(timeout=60)
    assert up.returncode == 1


def test_up_says_why_a_service_does_not_start(fake_modules: Path) -> None:
    up = start(["up", "--target", "t", "--port", "0", "--verify-options", "--fail"], stderr=subprocess.PIPE)
    _, errors = up.communicate(timeout=60)
    assert up.returncode == 1 and "verify ended with exit status 1" in errors and "the weights are missing" in errors


def test_up_names_a_missing_extra_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    result = run("up", "--target", "t", "--port", "0")
    assert result.exit_code == 1
    assert result.stderr == f"betoken: up needs torch: {how_to_install('router,worker')}\n"


def test_the_sdk_without_the_services_says_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "betoken." in name else find_spec(name))
    result = run("verify-worker", "--model", "t")
    assert result.exit_code == 1
    assert result.stderr == f"betoken: verify-worker needs betoken.verify_worker: {how_to_install('worker')}\n"


@pytest.mark.parametrize("extra", ["cli", "router", "worker", "router,worker"])
def test_hints_on_installing_name_a_part_of_this_project(extra: str) -> None:
    """By its name alone pip would search the package index, which may hold another project of that name."""
    hint = how_to_install(extra)
    assert hint.startswith("in a checkout of Betoken, pip install ") and f" -e '.[{extra}]'" in hint
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() >= set(extra.split(","))
    assert (ROOT / "constraints.txt").is_file()


@pytest.mark.parametrize(
    ("options", "option", "reported"),
    [
        ("--drafters model", "--drafters", "model: needs a draft model"),
        ("--drafters staged", "--drafters", "staged: needs a draft model"),
        ("--drafters model,ngram,staged", "--drafters", "model, staged: needs a draft model"),
        ("--drafters fused,ngram", "--drafters", "fused: chooses among others"),
        ("--draft d --drafters ngram", "--draft", "none of the drafters uses it"),
        ("--draft d --lookahead-model l --drafters lookahead", "--draft", "none of the drafters uses it"),
        ("--lookahead-model l", "--lookahead-model", "only `lookahead` uses it, which --drafters does not name"),
        ("--medusa m", "--medusa", "only `medusa` uses it, which --attached-drafters does not name"),
        ("--drafters nope", "--drafters", "'nope': must be among fused, model"),
        ("--drafters medusa", "--drafters", "'medusa': runs on verify workers only: name it in --attached-drafters"),
        ("--draft no/such/draft.gguf", "--draft", "no/such/draft.gguf: no such file or directory"),
    ],
)
def test_up_starts_with_all_that_was_asked_for_or_not_at_all(options: str, option: str, reported: str) -> None:
    result = run("up", "--target", "t", "--port", "0", *options.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"for {option}" in result.stderr and reported in result.stderr


def test_up_refuses_a_target_without_a_tokenizer_before_it_loads_models(tmp_path: Path) -> None:
    arguments = ["up", "--target", str(tmp_path), "--port", "0", "--drafters", "ngram"]
    result = run(*arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "has no tokenizer.json: add it, or name a directory that has it" in result.stderr
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    assert "version 0 is neither 2 nor 3" in run(*arguments, env={"COLUMNS": "400"}).stderr


@pytest.mark.parametrize("option", ["--draft", "--lookahead-model"])
def test_up_compares_tokenizers_before_it_loads_models(tmp_path: Path, option: str) -> None:
    for name, vocab in (("target", {"a": 0}), ("other", {"a": 0, "b": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    models = ["--target", str(tmp_path / "target"), option, str(tmp_path / "other")]
    result = run("up", *models, "--port", "0", "--drafters", "lookahead,ngram" if "look" in option else "model")
    assert result.exit_code == 2 and f"for {option}" in result.stderr
    assert "1 and 2 ids, the first that differs 1: none and 'b'" in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("options", "attached", "hosted"),
    [
        ([], "ngram", None),
        (["--attached-drafters", ""], "", "ngram"),
        (["--drafters", "ngram"], "", "ngram"),
        (["--draft", "d"], "", "fused,model,ngram,staged"),
        (["--draft", "d", "--attached-drafters", "ngram"], "ngram", "fused,model,ngram,staged"),
        (["--verify-options", "--attached-drafters=ngram"], "ngram", "ngram"),
    ],
)
def test_up_attaches_ngrams_where_nothing_better_is_named(
    fake_modules: Path, options: list[str], attached: str, hosted: str | None
) -> None:
    arguments = ["up", "--target", "t", "--port", "0", "--log-directory", str(fake_modules), *options]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    up.stdout.readline()
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)

    def reported(name: str) -> str | None:
        log = fake_modules / f"{name}.log"
        if not log.exists():
            return None
        line = log.read_text().splitlines()[0]
        option = "attached_drafters" if name == "verify" else "drafters"
        return str(json.loads(line.removeprefix("options "))[option])

    assert (reported("verify"), reported("draft")) == (attached, hosted)


def test_up_refuses_to_attach_what_cannot_be() -> None:
    result = run("up", "--target", "t", "--port", "0", "--attached-drafters", "model", env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "for --attached-drafters" in result.stderr and "must be among" in result.stderr


def test_up_says_which_of_the_default_drafters_go_without_a_draft_model(fake_modules: Path) -> None:
    up = start(["up", "--target", "t", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert up.stderr.readline() == "betoken: no --draft: without the drafters fused, model, staged\n"
    assert not any(line.startswith("draft ") for line in lines_until(up.stderr, "Ctrl-C stops all"))
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)


def test_up_says_what_the_router_finds_amiss_with_a_worker(fake_modules: Path) -> None:
    options = ["--drafters", "ngram", "--router-options", "--remark 'drafts short texts only'"]
    arguments = ["up", "--target", "t", "--port", "0", *options]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines_until(up.stderr, "draft drafts short texts only")
    up.stdout.readline()
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)


def test_up_minds_the_variables_of_the_services_it_starts(fake_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"PORT": str(port), "HOST": "0.0.0.0", "DTYPE": "float32", "COMPILE": "off", "THREADS": "3"}
    for name, value in (variables | {"DRAFTERS": "ngram", "LOOKAHEAD_MODEL": "elsewhere"}).items():
        monkeypatch.setenv(f"BETOKEN_{name}", value)
    arguments = ["up", "--target", "t", "--log-directory", str(fake_modules)]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert up.stdout.readline() == f"127.0.0.1:{port}\n"
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    reported = {}
    for name in ("verify", "draft", "router"):
        line = (fake_modules / f"{name}.log").read_text().splitlines()[0]
        reported[name] = json.loads(line.removeprefix("options "))
    assert reported["router"]["host"] == "0.0.0.0"
    assert (reported["verify"]["dtype"], reported["verify"]["compile"], reported["verify"]["threads"]) == (
        "float32",
        "off",
        "3",
    )
    assert (reported["draft"]["dtype"], reported["draft"]["compile"], reported["draft"]["drafters"]) == (
        "float32",
        "off",
        "ngram",
    )


def test_every_option_of_up_that_the_services_share_has_their_variable() -> None:
    """But for `draft`, addresses to the router, and `draft-threads`, which is `threads` of another service."""
    form = up_form()
    options = {field.name for field in fields(form)}
    shared = {name for cls in (RouterSettings, VerifyWorkerSettings, DraftWorkerSettings) for name in cls.model_fields}
    hints = get_type_hints(form, include_extras=True)
    for name in shared.intersection(options) - {"draft"}:
        assert get_args(hints[name])[1].envvar == f"BETOKEN_{name.upper()}", name


@pytest.mark.parametrize("option", ["--verify-options", "--draft-options", "--router-options"])
def test_up_refuses_options_with_an_open_quote(option: str) -> None:
    result = run("up", "--target", "t", "--port", "0", option, "--model 'x")
    assert result.exit_code == 2 and option in result.stderr


def test_up_reports_a_folder_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = run("up", "--target", "t", "--port", "0", "--log-directory", str(tmp_path / "taken"))
    assert result.exit_code == 1 and result.stderr.startswith("betoken: ") and "taken" in result.stderr


def test_up_finds_a_taken_port_before_it_loads_models(router) -> None:
    result = run("up", "--target", "t", "--port", router.address.partition(":")[2])
    assert result.exit_code == 2 and "for --port" in result.stderr


def test_up_finds_a_taken_socket_before_it_loads_models(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        assert checked_port(f"unix:{path}", None) == 0  # a file that a process left behind
        taken.listen()
        result = run("up", "--target", "t", "--host", f"unix:{path}")
    assert result.exit_code == 2 and "for --host" in result.stderr and "already in use" in result.stderr


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ("--host 192.0.2.1", "--host"),
        ("--host no.such.name.invalid", "--host"),
        ("--host unix:relative", "--host"),
        ("--host unix:/no/such/folder/socket", "--host"),
        ("--host unix:/socket#1", "--host"),
        ("--host unix:/socket --port 1", "--port"),
    ],
)
def test_up_says_whether_it_is_the_host_or_thechecked_port(options: str, option: str) -> None:
    result = run("up", "--target", "t", *options.split())
    assert result.exit_code == 2 and f"for {option}" in result.stderr


def test_up_needs_only_one_of_the_addresses_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # As of localhost where its first address is ::1 and the machine, or the container, has no IPv6.
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: addresses)
    assert checked_port("two-addresses", 0) == 0
    addresses.pop()
    with pytest.raises(typer.BadParameter, match="two-addresses"):
        checked_port("two-addresses", 0)


def test_up_serves_on_a_unix_socket_and_leaves_logs_only(fake_modules: Path) -> None:
    socket, logs = fake_modules / "router.sock", fake_modules / "logs"
    arguments = ["up", "--target", "t", "--host", f"unix:{socket}", "--log-directory", str(logs)]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert up.stdout.readline().strip() == f"unix:{socket}"
    assert run("info", "--address", f"unix:{socket}").exit_code == 0
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 0
    assert {file.suffix for file in logs.iterdir()} <= {".log", ".sock"}


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
        output += os.read(ours, 1024)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    with suppress(OSError):  # a terminal's end, once all it was sent has been read
        while chunk := os.read(ours, 1024):
            output += chunk
    assert b"\x1b[32mgreen" in output and b"cancelled" in output
    assert router.cancelled.wait(30)
    os.close(ours)


@pytest.mark.parametrize("options", [[], ["--raw"], ["--no-special-tokens"]])
@pytest.mark.parametrize("has_template", [True, False])
def test_a_prompt_is_a_message_if_the_model_has_a_chat_template(
    answering, has_template: bool, options: list[str]
) -> None:
    answering.has_chat_template = has_template
    assert run("generate", "hi", "--address", answering.address, *options).exit_code == 0
    (request,) = answering.requests
    is_chat = has_template and not options
    assert [(m.role, m.content) for m in request.messages.messages] == [("user", "hi")] * is_chat
    assert request.prompt == ("" if is_chat else "hi")


@pytest.mark.parametrize("options", ["--chat", "--system s", "--begin b"])
def test_a_raw_prompt_excludes_options_of_chats(options: str) -> None:
    assert "excludes --chat, --system and --begin" in run("generate", "hi", "--raw", *options.split()).stderr


def test_progress_without_a_terminal_is_a_line_for_each_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(Console()) as show:
        for fraction in (0.2, 0.201, 0.204, 0.21):
            show("verify", Progress("packing weights", fraction))
    assert capsys.readouterr().out.split("\n") == ["verify: packing weights (20%)", "verify: packing weights (21%)", ""]


@pytest.mark.parametrize("closed", ["2>&-", "<&-", ">&-"])
def test_a_closed_stream_is_no_failure(router, script, closed: str) -> None:
    router.will(script.start(), script.tokens("abc", 5), script.finish(1))
    command = f'exec "$0" -m betoken.cli generate x --address {router.address} {closed}'
    result = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert closed == ">&-" or result.stdout.startswith("abc")
