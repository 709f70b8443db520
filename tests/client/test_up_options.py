"""Options of `betoken up` are checked before models are loaded: extras, tokenizers, drafters, ports, folders."""

import importlib.util
import json
import signal
import socket
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer

from betoken.cli.connection import in_options
from betoken.cli.up_checks import checked_port
from betoken.cli.up_options import up_options_class
from betoken.client import (
    InvalidArgumentError,
)
from betoken.common.release import how_to_install
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.router.settings import RouterSettings
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.client.command import lines_until, run, start, unused_port
from tests.pipes import line_of


def test_up_names_its_own_options_of_the_connection() -> None:
    error = InvalidArgumentError("tls.ca_file", "x.pem", "must hold PEM")
    assert in_options(error, "--router-").startswith("--router-tls-ca-file = x.pem")


def test_up_names_a_missing_extra_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    result = run("up", "--target", "t", "--port", "0")
    assert result.exit_code == 1
    assert result.stderr == f"betoken: up needs torch: {how_to_install('router,worker')}\n"


def test_up_refuses_a_target_without_a_tokenizer_before_it_loads_models(tmp_path: Path) -> None:
    arguments = ["up", "--target", str(tmp_path), "--port", "0", "--drafters", "ngram"]
    result = run(*arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "has no tokenizer.json: add it, or name a directory that has it" in result.stderr
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    assert "version 0 is neither 2 nor 3" in run(*arguments, env={"COLUMNS": "400"}).stderr


@pytest.mark.parametrize("option", ["--draft", "--lookahead-model"])
def test_up_compares_tokenizers_before_it_loads_models(tmp_path: Path, option: str) -> None:
    """`lookahead` drafts in the target's ids only."""
    for name, vocab in (("target", {"a": 0}), ("other", {"a": 0, "b": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    models = ["--target", str(tmp_path / "target"), option, str(tmp_path / "other")]
    result = run("up", *models, "--port", "0", "--drafters", "lookahead,ngram")
    assert result.exit_code == 2 and f"for {option}" in result.stderr
    assert "1 and 2 ids, the first that differs 1: none and 'b'" in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("options", "attached", "hosted"),
    [
        ([], "builtin,ngram", None),
        (["--attached-drafters", ""], "none", "ngram"),
        (["--drafters", "ngram"], "none", "ngram"),
        (["--draft", "d"], "builtin,ngram", "fused,model,ngram,staged"),
        (["--draft", "d", "--attached-drafters", "ngram"], "ngram", "fused,model,ngram,staged"),
        (["--verify-options", "--attached-drafters=ngram"], "ngram", "ngram"),
    ],
)
def test_up_attaches_ngrams_and_built_in_drafters_unless_drafters_are_named(
    fake_modules: Path, options: list[str], attached: str, hosted: str | None
) -> None:
    arguments = ["up", "--target", "t", "--port", "0", "--log-directory", str(fake_modules), *options]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    line_of(up.stdout)
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


def test_up_names_the_target_to_a_draft_worker_with_another_tokenizer(fake_modules: Path, tmp_path: Path) -> None:
    for name, vocab in (("target", {"a": 0}), ("draft", {"a": 0, "b": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    models = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--drafters", "model,ngram"]
    arguments = ["up", *models, "--port", "0", "--log-directory", str(fake_modules)]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "draft has another tokenizer than" in line_of(up.stderr)
    line_of(up.stdout)
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    line = (fake_modules / "draft.log").read_text().splitlines()[0]
    assert json.loads(line.removeprefix("options "))["target_tokenizer"] == str(tmp_path / "target")


def test_up_rejects_attaching_an_unsupported_drafter() -> None:
    result = run("up", "--target", "t", "--port", "0", "--attached-drafters", "model", env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "for --attached-drafters" in result.stderr and "must be among" in result.stderr


def test_up_says_which_of_the_default_drafters_go_without_a_draft_model(fake_modules: Path) -> None:
    up = start(["up", "--target", "t", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert line_of(up.stderr) == "betoken: no --draft: without the drafters fused, model, staged\n"
    assert not any(line.startswith("draft ") for line in lines_until(up.stderr, "Ctrl-C stops all"))
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)


def test_up_reads_the_environment_variables_of_its_services(
    fake_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = unused_port()
    variables = {"PORT": str(port), "HOST": "0.0.0.0", "DTYPE": "float32", "COMPILE": "off", "THREADS": "3"}
    for name, value in (variables | {"DRAFTERS": "ngram", "LOOKAHEAD_MODEL": "elsewhere"}).items():
        monkeypatch.setenv(f"BETOKEN_{name}", value)
    arguments = ["up", "--target", "t", "--log-directory", str(fake_modules)]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert line_of(up.stdout) == f"127.0.0.1:{port}\n"
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
    declared = up_options_class()
    options = {field.name for field in fields(declared)}
    shared = {name for cls in (RouterSettings, VerifyWorkerSettings, DraftWorkerSettings) for name in cls.model_fields}
    hints = get_type_hints(declared, include_extras=True)
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
def test_up_reports_whether_the_host_or_the_port_is_invalid(options: str, option: str) -> None:
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
