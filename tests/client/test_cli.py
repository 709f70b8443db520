"""`betoken generate` and the other commands against a scripted router."""

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import typer

from betoken.cli.connection import in_options, option_of
from betoken.cli.generate_options import GenerateOptions
from betoken.cli.main import app
from betoken.client import (
    InternalError,
    InvalidArgumentError,
    Sampling,
    Speculation,
)
from betoken.router.access.keys import Keys
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2
from tests.client.command import ACCEPTED, STATS, cli, run


@pytest.fixture
def answering(router, script):
    router.will(
        script.start(seed=5, mode=types_pb2.VERIFICATION_MODE_TYPICAL),
        script.tokens("ab", 5, 6, **ACCEPTED),
        script.tokens("c", 7, origin=types_pb2.TOKEN_ORIGIN_RECOVERED),
        script.finish(3, speculation=STATS),
    )
    return router


def test_generate_writes_only_text_into_a_pipe(answering) -> None:
    result = run("generate", "hi", "--address", answering.address)
    assert (result.exit_code, result.stdout) == (0, "abc\n")


def test_generate_reads_the_prompt_from_standard_input(answering) -> None:
    text = "from a pipe,\r\nline ends\rand all\n"
    result = run("generate", "--address", answering.address, input=text)
    assert result.exit_code == 0 and answering.requests[0].prompt == text


def test_standard_input_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class HungUp(BytesIO):  # a terminal that was closed
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdin", TextIOWrapper(HungUp()))
    with pytest.raises(typer.BadParameter, match="standard input cannot be read: .*Input/output error"):
        GenerateOptions().question()


def test_a_prompt_that_is_not_text_is_rejected_in_every_locale() -> None:
    for locale in ("C", "C.UTF-8"):
        environment = os.environ | {"LC_ALL": locale}
        command = [sys.executable, "-m", "betoken.cli", "generate", "--address", "127.0.0.1:1"]
        done = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environment, timeout=60)
        assert done.returncode == 2 and b"standard input is not text" in done.stderr


def test_text_that_the_locale_cannot_write_is_escaped(router, script) -> None:
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


def test_generate_json_is_one_object(answering) -> None:
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


def test_every_option_of_generate_reaches_the_request(answering) -> None:
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


def test_tokenization_options_reach_the_request(answering) -> None:
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


def test_the_option_off_reaches_the_request(answering) -> None:
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
def test_invalid_options_of_generate_are_rejected_locally(options: str) -> None:
    result = run("generate", *options.split())
    assert result.exit_code == 2 and options.split()[0] in result.stderr


def test_a_bias_without_a_value_is_reported_the_form_of_a_bias() -> None:
    assert "'4' is not ID=BIAS" in run("generate", "--logit-bias", "4").stderr


def test_an_error_of_the_router_is_reported_in_one_line(router) -> None:
    router.will(InvalidArgumentError("sampling.temperature", -1.0, "must be 0 or more"))
    result = run("generate", "hi", "--temperature", "-1", "--address", router.address)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("betoken: INVALID_ARGUMENT: --temperature = -1.0: must be 0 or more")


def test_an_error_of_the_router_is_json_with_the_option_json(router) -> None:
    router.will(InvalidArgumentError("sampling.temperature", -1.0, "must be 0 or more"))
    result = run("generate", "hi", "--json", "--address", router.address)
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1
    assert (error["code"], error["field"], error["limit"]) == (
        "INVALID_ARGUMENT",
        "sampling.temperature",
        "must be 0 or more",
    )


def test_a_broken_answer_is_part_of_its_json_error(router, script) -> None:
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
def test_an_error_names_the_option_of_the_invalid_value(field: str, option: str) -> None:
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


def test_a_new_key_is_admitted_by_its_entry(tmp_path: Path) -> None:
    result = cli.invoke(app, ["new-key", "alice", "--tenant", "team"])
    file = tmp_path / "keys.toml"
    file.write_text(result.stdout)
    key = result.stderr.split()[-1]
    caller = Keys(file).caller([("authorization", f"Bearer {key}")])
    assert caller.tenant_of("") == "team"
    assert key not in result.stdout
    assert cli.invoke(app, ["new-key", "a\nb"]).exit_code == 2


def test_a_new_key_as_json_is_admitted_by_its_entry(tmp_path: Path) -> None:
    result = cli.invoke(app, ["new-key", "alice", "--json"])
    made = json.loads(result.stdout)
    (tmp_path / "keys.toml").write_text(made["entry"])
    caller = Keys(tmp_path / "keys.toml").caller([("authorization", f"Bearer {made['key']}")])
    assert caller.tenant_of("") == made["tenant"] == made["name"] == "alice"
    assert made["hash"] in made["entry"] and not result.stderr


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


@pytest.mark.parametrize("closed", ["2>&-", "<&-", ">&-"])
def test_a_closed_standard_output_is_not_a_failure(router, script, closed: str) -> None:
    router.will(script.start(), script.tokens("abc", 5), script.finish(1))
    command = f'exec "$0" -m betoken.cli generate x --address {router.address} {closed}'
    result = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert closed == ">&-" or result.stdout.startswith("abc")
