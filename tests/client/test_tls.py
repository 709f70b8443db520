"""The clients and the command over TLS."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from betoken.cli.main import app
from betoken.client import (
    AsyncClient,
    Client,
    ClientTls,
    FailedPreconditionError,
    InvalidArgumentError,
    RetryPolicy,
    UnavailableError,
)
from betoken.common.tls import ServerTls
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import generation_pb2_grpc
from tests.certificates import make_certificate
from tests.client.command import start
from tests.pipes import line_of

ONCE = RetryPolicy(max_retries=0)


class Server(generation_pb2_grpc.GenerationServiceServicer):
    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="tiny")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.{pem,key} for the name `router`; it signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, "server", "router")
    return folder


@pytest.fixture
def address(files: Path) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Server(), server)
    credentials = ServerTls(files / "server.pem", files / "server.key").credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(("present", "missing"), [("cert_file", "key_file"), ("key_file", "cert_file")])
@pytest.mark.parametrize("is_empty", [False, True])
def test_half_of_a_certificate_pair_is_rejected_by_name(
    files: Path, tmp_path: Path, present: str, missing: str, is_empty: bool
) -> None:
    """gRPC would end the whole process."""
    (tmp_path / "empty").touch()
    other = {missing: tmp_path / "empty"} if is_empty else {}
    tls = ClientTls(**{present: files / ("server.pem" if present == "cert_file" else "server.key")}, **other)
    with pytest.raises(InvalidArgumentError, match=rf"^tls\.{missing} = "):
        tls.credentials()  # without a channel, so that a failure of this test ends no process


@pytest.mark.parametrize("kind", [ClientTls, ServerTls])
@pytest.mark.parametrize("algorithm", ["ec -pkeyopt ec_paramgen_curve:prime256v1", "rsa -pkeyopt rsa_keygen_bits:2048"])
def test_another_certificates_key_is_refused_by_name(files: Path, tmp_path: Path, kind: Any, algorithm: str) -> None:
    """gRPC says so in its own log only."""
    command = f"openssl genpkey -algorithm {algorithm} -out {tmp_path / 'other.key'}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(InvalidArgumentError, match=r"^tls\.key_file = .*: .*server\.pem"):
        kind(cert_file=files / "server.pem", key_file=tmp_path / "other.key").credentials()


@pytest.mark.parametrize("kind", [ClientTls, ServerTls])
@pytest.mark.parametrize("form", ["pkcs8 -topk8", "ec -aes256"])
def test_an_encrypted_key_is_reported(files: Path, tmp_path: Path, kind: Any, form: str) -> None:
    key = tmp_path / "encrypted.key"
    command = f"openssl {form} -in {files / 'server.key'} -out {key} -passout pass:secret"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(InvalidArgumentError, match="must be unencrypted") as caught:
        kind(cert_file=files / "server.pem", key_file=key).credentials()
    assert (caught.value.field, caught.value.value) == ("tls.key_file", str(key))


@pytest.mark.parametrize("kind", [ClientTls, ServerTls])
def test_swapped_tls_files_are_reported_by_their_content(files: Path, kind: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^tls\.key_file = .*: must hold a private key, and holds a cert"):
        kind(cert_file=files / "server.key", key_file=files / "server.pem").credentials()
    with pytest.raises(InvalidArgumentError, match="cert_file = .*must hold certificates, and holds a private key"):
        kind(cert_file=files / "server.key", key_file=files / "server.key").credentials()


def test_a_private_key_is_rejected_as_a_certificate_authority(files: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tls\.ca_file = .*must hold certificates"):
        ClientTls(ca_file=files / "server.key").credentials()


@pytest.mark.parametrize("content", ["", "not a certificate"])
def test_a_file_without_certificates_is_not_taken_for_the_systems_roots(tmp_path: Path, content: str) -> None:
    (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(InvalidArgumentError, match=rf"^tls\.ca_file = {re.escape(str(tmp_path / 'ca.pem'))}: "):
        ClientTls(ca_file=tmp_path / "ca.pem").credentials()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_tls_server_name_that_is_not_text_is_rejected_by_name(kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tls\.server_name = \\udcff: must be valid Unicode"):
        kind("localhost:50051", tls=ClientTls(server_name="\udcff"))


def test_without_a_tls_server_name_the_host_of_the_address_is_checked() -> None:
    absent: Any = None  # as `os.environ.get` gives it
    Client("localhost:50051", tls=ClientTls(server_name=absent)).close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_missing_tls_file_is_reported_at_once(kind: type[Client | AsyncClient], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.pem"):
        kind("localhost:50051", tls=ClientTls(ca_file=tmp_path / "absent.pem"))


async def test_a_client_that_trusts_the_certificate_is_served(files: Path, address: str) -> None:
    tls = ClientTls(ca_file=str(files / "server.pem"), server_name="router")
    with Client(address, tls=tls) as client:
        assert client.model_info().model == "tiny"
    async with AsyncClient(address, tls=tls) as client:
        assert (await client.model_info()).model == "tiny"


async def test_a_client_that_does_not_trust_the_certificate_is_not_served(files: Path, address: str) -> None:
    for tls in (None, ClientTls(server_name="router"), ClientTls(ca_file=files / "server.pem", server_name="other")):
        with Client(address, tls=tls, retry=ONCE) as client, pytest.raises(UnavailableError):
            client.model_info()


@pytest.mark.parametrize("unusable", ["ca_file", "key_file"])
async def test_unusable_tls_files_are_reported_and_not_retried(
    files: Path, address: str, tmp_path: Path, unusable: str
) -> None:
    """gRPC reports them only as a failed connection."""
    label = "CERTIFICATE" if unusable == "ca_file" else "PRIVATE KEY"
    (tmp_path / "broken.pem").write_text(f"-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n")
    used = {"ca_file": files / "server.pem", "cert_file": files / "server.pem", "key_file": files / "server.key"}
    tls = ClientTls(**(used | {unusable: tmp_path / "broken.pem"}), server_name="router")
    with Client(address, tls=tls) as client, pytest.raises(FailedPreconditionError, match="TLS files of this side"):
        client.model_info()
    async with AsyncClient(address, tls=tls) as client:
        with pytest.raises(FailedPreconditionError, match="TLS files of this side"):
            await client.complete("hi")


def test_the_command_accepts_certificate_options(files: Path, address: str) -> None:
    options = ["--address", address, "--tls-ca-file", str(files / "server.pem"), "--tls-server-name", "router"]
    result = CliRunner().invoke(app, ["info", "--json", *options])
    assert json.loads(result.stdout)["model"] == "tiny"


@pytest.mark.parametrize("command", [["info"], ["generate", "hi"]], ids=["info", "generate"])
def test_the_command_reports_a_missing_certificate(tmp_path: Path, command: list[str]) -> None:
    absent = str(tmp_path / "absent.pem")
    result = CliRunner().invoke(app, [*command, "--tls-ca-file", absent])
    assert (
        result.exit_code == 1
        and f"--tls-ca-file = {absent}: cannot be read (No such file or directory)" in result.stderr
    )
    result = CliRunner().invoke(app, [*command, "--json", "--tls-ca-file", absent])
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1 and (error["code"], error["value"]) == ("INVALID_ARGUMENT", absent)


def test_up_reaches_a_router_that_speaks_tls(files: Path, fake_modules: Path) -> None:
    certificate, key = files / "server.pem", files / "server.key"
    arguments = ["up", "--target", "t", "--port", "0", "--router-tls-ca-file", str(certificate)]
    arguments += ["--router-tls-server-name", "router"]
    arguments += ["--router-options", f"--tls-cert-file {certificate} --tls-key-file {key}"]
    up = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    address = line_of(up.stdout).strip()
    up.send_signal(signal.SIGINT)
    _, errors = up.communicate(timeout=60)
    assert up.returncode == 0, errors
    assert f"--address {address} --tls-ca-file {certificate} --tls-server-name router" in errors


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("--router-options", "--tls-cert-file c --tls-key-file k"), "--router-tls-ca-file"),
        (("--router-options", "--tls-cert-file=c --tls-key-file=k"), "--router-tls-ca-file"),
        (("--router-tls-server-name", "router"), "--tls-cert-file"),
    ],
)
def test_up_refuses_a_router_it_could_not_reach(options: tuple[str, ...], reported: str) -> None:
    result = CliRunner().invoke(app, ["up", "--target", "t", "--port", "0", *options])
    assert result.exit_code == 2 and reported in result.stderr


@pytest.mark.parametrize("name", ["BETOKEN_TLS_CERT_FILE", "BETOKEN_WORKER_TLS_CA_FILE"])
def test_up_refuses_tls_between_its_services(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "c")
    result = CliRunner().invoke(app, ["up", "--target", "t", "--port", "0"])
    assert result.exit_code == 2 and name in result.stderr
