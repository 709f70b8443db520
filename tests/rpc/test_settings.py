"""Settings: the command line beats the environment beats the default, and a bad value is named."""

import errno
import os
import re
from typing import Any

import pytest
from pydantic import Field, ValidationError

from betoken.gateway.settings import GatewaySettings
from betoken.router.settings import RouterSettings
from betoken.rpc.settings import CommaSeparated, ServiceSettings
from betoken.rpc.worker_settings import WorkerSettings
from betoken.verify_worker.settings import VerifyWorkerSettings

TOO_LONG = "x" * 300


class ExampleSettings(ServiceSettings):
    """An example service."""

    verify: CommaSeparated = Field((), description="Verify workers, HOST:PORT, comma-separated.")
    num_pages: int | None = Field(None, ge=1, description="KV pages.")
    greedy: bool = Field(False, description="A switch.")


def test_options_of_the_command_line_precede_the_environment_and_the_default(monkeypatch):
    assert ExampleSettings.parse([]).host == "127.0.0.1"
    monkeypatch.setenv("BETOKEN_PORT", "1000")
    monkeypatch.setenv("BETOKEN_NUM_PAGES", "7")
    monkeypatch.setenv("BETOKEN_SOMETHING_ELSE", "of another service")
    monkeypatch.setenv("BETOKEN_HOST", "")
    settings = ExampleSettings.parse(["--port", "2000"])
    assert (settings.port, settings.num_pages, settings.host) == (2000, 7, "127.0.0.1")


@pytest.mark.parametrize("arguments", [["--otlp-endpoint", "", "--verify", ""], ["--otlp-endpoint=", "--verify="]])
def test_an_empty_option_is_the_default_whatever_the_environment_says(monkeypatch, arguments):
    monkeypatch.setenv("BETOKEN_OTLP_ENDPOINT", "http://collector:4317")
    monkeypatch.setenv("BETOKEN_VERIFY", "a:1")
    settings = ExampleSettings.parse(arguments)
    assert (settings.otlp_endpoint, settings.verify) == ("", ())


def test_list_options_are_comma_separated(monkeypatch):
    assert ExampleSettings.parse(["--verify", "a:1,b:2", "--verify", "c:3"]).verify == ("a:1", "b:2", "c:3")
    monkeypatch.setenv("BETOKEN_VERIFY", "d:4, e:5,")
    assert ExampleSettings.parse([]).verify == ("d:4", "e:5")


@pytest.mark.parametrize("url", ["", "http://localhost:4317", "https://collector.example", "http://[::1]:4317/"])
def test_an_otlp_endpoint_is_accepted(url):
    assert ExampleSettings.parse(["--otlp-endpoint", url]).otlp_endpoint == url


def test_boolean_options_are_switches():
    assert ExampleSettings.parse(["--greedy"]).greedy
    assert not ExampleSettings.parse(["--no-greedy"]).greedy


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--port", "70000"], ["--port (BETOKEN_PORT) = '70000'", "less than or equal to 65535"]),
        (["--max-concurrent-rpcs", str(1 << 31)], ["--max-concurrent-rpcs", "less than or equal to 1048576"]),
        (["--num-pages", "few"], ["--num-pages (BETOKEN_NUM_PAGES) = 'few'", "valid integer"]),
        (["--log-level", "loud"], ["--log-level", "'loud'", "'debug', 'info'"]),
        (["--drain-grace-s", "nan"], ["--drain-grace-s"]),
        (["--host", "unix:relative.sock"], ["--host", "'unix:relative.sock' is not unix:/PATH"]),
        (["--host", f"unix:/{'x' * 107}"], ["--host", "at most 107 bytes"]),
        (["--host", "unix:/run#1/x.sock"], ["--host", "without ? # % and commas"]),
        (["--host", "unix:/run%201/x.sock"], ["--host", "without ? # % and commas"]),
        (["--host", "unix:/run,1/x.sock"], ["--host", "without ? # % and commas"]),
        (["--host", "unix:/run/x.sock", "--port", "1"], ["--port 1: a Unix socket has no port"]),
        (["--tls-cert-file", __file__], ["--tls-cert-file and --tls-key-file go together"]),
        (["--tls-client-ca-file", __file__], ["--tls-client-ca-file needs --tls-cert-file"]),
        (["--tls-cert-file", __file__, "--tls-key-file", "none.pem"], ["--tls-key-file", "'none.pem'"]),
        (["--otlp-endpoint", "garbage"], ["--otlp-endpoint", "'garbage': must be http://HOST:PORT"]),
        (["--otlp-endpoint", "ftp://box:4317"], ["--otlp-endpoint"]),
        (["--otlp-endpoint", "http://:4317"], ["--otlp-endpoint"]),
        (["--otlp-endpoint", "http://box:high"], ["--otlp-endpoint"]),
        (["--otlp-endpoint", "http://box:4317/v1/traces"], ["--otlp-endpoint"]),
        (["--otlp-endpoint", "http://box"], ["--otlp-endpoint"]),  # gRPC would dial port 443
        (["--otlp-endpoint", "http://user:secret@box:4317"], ["--otlp-endpoint"]),  # and look the whole up as a host
        (["--ready-file", "/no/such/folder/ready"], ["--ready-file", "'/no/such/folder' is not a directory"]),
        (["--ready-file", "/"], ["--ready-file", "'/' is not a writable file"]),
        (["--ready-file", "r" * 242], ["--ready-file", "a name of 242 bytes; at most 241"]),
        (["--ready-file", f"{TOO_LONG}/ready"], ["--ready-file", "cannot be looked at: File name too long"]),
        (["--tls-cert-file", TOO_LONG, "--tls-key-file", __file__], ["--tls-cert-file", "cannot be looked at: "]),
        (["--port", "1", "--bogus", "2"], ["unrecognized arguments: --bogus"]),
        (["--port", "-1", "--num-pages", "0"], ["--port", "--num-pages"]),
    ],
)
def test_a_bad_option_value_stops_the_start_and_is_named(arguments, texts, capsys):
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.parse(arguments, program="betoken.example")
    assert caught.value.code == 2
    message = capsys.readouterr().err
    for text in ["betoken.example", *texts]:
        assert text in message


def test_file_options_in_an_inaccessible_folder_are_named(monkeypatch, capsys):
    """As keys under /etc/ssl/private are for services that are not root's."""

    def stat(path, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    names = ["ready-file", "tls-cert-file", "tls-key-file", "tls-client-ca-file"]
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.parse([part for name in names for part in (f"--{name}", "/closed/file")])
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert f"--{name}" in line and line.endswith("'/closed/file': cannot be looked at: Permission denied")


def test_a_worker_id_that_is_not_text_is_named(capsys):
    """Its handshake could not be made."""
    with pytest.raises(SystemExit):
        WorkerSettings.parse(["--model", "m", "--worker-id", "\udcff"])
    assert "--worker-id (BETOKEN_WORKER_ID) = " in capsys.readouterr().err


def test_a_bad_environment_value_is_named(monkeypatch, capsys):
    monkeypatch.setenv("BETOKEN_PORT", "http")
    with pytest.raises(SystemExit):
        ExampleSettings.parse([])
    assert "(BETOKEN_PORT) = 'http'" in capsys.readouterr().err


def test_settings_are_frozen_and_refuse_unknown_names():
    settings = ExampleSettings.parse([])
    with pytest.raises(ValidationError, match="port"):
        settings.port = 3
    with pytest.raises(ValidationError, match="bogus"):
        ExampleSettings(bogus=3)


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.parse(["--help"], program="betoken.example")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in ExampleSettings.model_fields.items():
        assert field.description, name
        assert "--" + name.replace("_", "-") in text
        assert f"BETOKEN_{name.upper()}" in text


def test_tls_files_become_server_tls(tmp_path):
    assert ExampleSettings.parse([]).server_tls is None
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.touch()
    key.touch()
    tls = ExampleSettings.parse(["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]).server_tls
    assert (tls.cert_file, tls.key_file, tls.client_ca_file) == (certificate, key, None)


def test_a_required_option_that_is_missing_says_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        VerifyWorkerSettings.parse([], program="betoken verify-worker")
    told = capsys.readouterr().err
    assert told.startswith("betoken verify-worker: --model (BETOKEN_MODEL): must be given. Model: a GGUF file")


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (RouterSettings, "--verify a:1 --tokenizer t --max-probes 2"),
        (VerifyWorkerSettings, "--model m --page-size 8"),
        (VerifyWorkerSettings, "--model m --eagle3-depth 4"),
        (VerifyWorkerSettings, "--model m --max-ngram 4"),
        (VerifyWorkerSettings, "--model m --min-ngram 4"),
    ],
)
def test_a_removed_option_is_not_recognized(settings: Any, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(arguments.split())
    assert f"unrecognized arguments: {' '.join(arguments.split()[-2:])}" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [VerifyWorkerSettings, RouterSettings, GatewaySettings])
def test_help_shows_option_placeholders_in_place_of_types(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(["--help"])
    told = capsys.readouterr().out
    assert not re.search(r"--[a-z-]+ (tuple|str|int|float|Path)\b", told) and "--port N" in told
