"""TLS of services: client certificates, renewed certificates, and files that are rejected by name."""

import asyncio
import os
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from betoken.common.tls import ClientTls
from betoken.rpc.link import LinkCallbacks, LinkOptions, LinkServicer, VerifyLink
from betoken.rpc.server import Service, serve
from betoken.rpc.settings import ServiceSettings
from betoken.v1 import verify_pb2_grpc
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.rpc.harness import Running

from .conftest import HELLO, EchoHandler


async def test_tls_with_and_without_client_certificates(certificates):
    files = {name: certificates / name for name in os.listdir(certificates)}
    handler = EchoHandler()
    servicer = LinkServicer(lambda: HELLO, handler, VerifyLinkResponse)
    service = Service("betoken.v1.VerifyService", servicer, verify_pb2_grpc.add_VerifyServiceServicer_to_server)
    ignore = LinkCallbacks(lambda *_: None, lambda *_: None, lambda *_: None, lambda _: None)

    async def connects(address: str, tls: ClientTls | None) -> bool:
        link = VerifyLink(address, ignore, LinkOptions(tls=tls, connect_timeout_s=20))
        try:
            await link.connect_once()
        except UnavailableError:
            return False
        finally:
            await link.close()
        return True

    server_files = {"tls_cert_file": files["server.pem"], "tls_key_file": files["server.key"]}
    anonymous = ClientTls(ca_file=files["server.pem"], server_name="localhost")
    known = ClientTls(files["server.pem"], files["client.pem"], files["client.key"], "localhost")
    unknown = ClientTls(files["server.pem"], files["stranger.pem"], files["stranger.key"], "localhost")
    for client_ca, expected in ((None, [True, True, False]), (files["client.pem"], [False, True, False])):
        async with asyncio.TaskGroup() as tasks:
            settings = ServiceSettings(**server_files, tls_client_ca_file=client_ca)
            running = Running(tasks, settings, [service])
            address = await running.address()
            assert [await connects(address, tls) for tls in (anonymous, known, None)] == expected
            if client_ca is not None:
                assert not await connects(address, unknown)
            running.stop.set()


def junk_pair(directory: Path) -> tuple[Path, Path]:
    """Files in the form of a certificate and a key that are neither."""
    cert, key = directory / "no.pem", directory / "no.key"
    for file, label in ((cert, "CERTIFICATE"), (key, "PRIVATE KEY")):
        file.write_text(f"-----BEGIN {label}-----\nnothing\n-----END {label}-----\n")
    return cert, key


async def test_a_router_with_invalid_tls_files_is_reported(certificates):
    no, no_key = junk_pair(certificates)
    server = certificates / "server.pem"
    ignore = LinkCallbacks(lambda *_: None, lambda *_: None, lambda *_: None, lambda _: None)
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(tls_cert_file=server, tls_key_file=certificates / "server.key"))
        address = await running.address()
        for tls in (ClientTls(no), ClientTls(server, no, no_key)):
            link = VerifyLink(address, ignore, LinkOptions(tls=tls, connect_timeout_s=20))
            with pytest.raises(FailedPreconditionError, match="TLS files of this side"):
                await link.connect_once()
            await link.close()
        running.stop.set()


async def test_a_renewed_certificate_is_shown_to_new_connections(certificates, caplog):
    """Without a restart; in the midst of being replaced, the files change nothing."""
    cert, key = certificates / "own.pem", certificates / "own.key"

    def replace(file: Path, content: Path | str) -> None:
        file.write_text(content if isinstance(content, str) else content.read_text())

    async def accepts(address: str, ca: str) -> bool:
        credentials = ClientTls(certificates / ca).credentials()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address.replace("127.0.0.1", "localhost"), credentials, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            except grpc.aio.AioRpcError:
                return False
            return True

    replace(cert, certificates / "server.pem")
    replace(key, certificates / "server.key")
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(tls_cert_file=cert, tls_key_file=key), [])
        address = await running.address()
        assert await accepts(address, "server.pem")
        for half_way in (certificates / "client.pem", "-----BEGIN CERTIFICATE-----", ""):
            replace(cert, half_way)
            assert await accepts(address, "server.pem")
        assert all(name in caplog.text for name in ("tls.key_file", "tls.cert_file"))  # no pair; the empty one
        cert.unlink()
        assert await accepts(address, "server.pem")
        replace(cert, certificates / "client.pem")
        replace(key, certificates / "client.key")
        assert await accepts(address, "client.pem")
        assert not await accepts(address, "server.pem")
        running.stop.set()


async def test_a_missing_tls_file_is_named(tmp_path):
    for name in ("own.pem", "own.key"):
        (tmp_path / name).touch()
    settings = ServiceSettings(tls_cert_file=tmp_path / "own.pem", tls_key_file=tmp_path / "own.key")
    (tmp_path / "own.key").unlink()
    with pytest.raises(FailedPreconditionError, match=r"own\.key"):
        await serve([], settings, stop=asyncio.Event())


async def test_invalid_tls_files_are_named_as_the_likely_cause(tmp_path):
    cert, key = junk_pair(tmp_path)
    settings = ServiceSettings(tls_cert_file=cert, tls_key_file=key)
    with pytest.raises(FailedPreconditionError, match="TLS files"):
        await serve([], settings, stop=asyncio.Event())


@pytest.mark.parametrize("name", ["cert_file", "key_file", "client_ca_file"])
async def test_a_tls_file_without_pem_is_named(tmp_path, name):
    """A server with an empty file of CAs would start, and refuse every client."""
    (tmp_path / "empty").touch()
    cert, key = junk_pair(tmp_path)
    files = {"cert_file": cert.name, "key_file": key.name, "client_ca_file": cert.name, name: "empty"}
    settings = ServiceSettings(**{f"tls_{option}": tmp_path / file for option, file in files.items()})
    with pytest.raises(InvalidArgumentError, match=rf"tls\.{name} = .*empty: must hold PEM"):
        await serve([], settings, stop=asyncio.Event())
