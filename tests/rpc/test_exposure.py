"""Whoever starts a service that other machines reach hears once what it lacks."""

import socket

import pytest

from betoken.common.address import is_own_host, is_own_peer
from betoken.router.settings import RouterSettings
from betoken.rpc import server
from betoken.rpc.exposure import warning_of
from betoken.rpc.settings import ServiceSettings
from tests.certificates import make_certificate


@pytest.fixture
def files(tmp_path):
    make_certificate(tmp_path, "service", "localhost")
    keys = tmp_path / "keys.toml"
    keys.touch()
    cert, key = tmp_path / "service.pem", tmp_path / "service.key"
    return {"tls_cert_file": cert, "tls_key_file": key, "api_keys_file": keys}


def router(**options):
    return RouterSettings(verify=("a:1",), tokenizer="x", **options)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "unix:/tmp/betoken.sock"])
def test_a_loopback_address_logs_no_exposure_warning(host):
    assert is_own_host(host)
    assert warning_of(ServiceSettings(host=host)) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.1.2.3", "no-such-name.invalid"])
def test_an_exposed_address_logs_one_warning_of_missing_protection(host):
    text = warning_of(router(host=host))
    assert host in text and "\n" not in text
    for part in ("without TLS", "--tls-cert-file", "--api-keys-file", "--tls-client-ca-file", "--insecure"):
        assert part in text
    assert warning_of(router(host=host, insecure=True)) == ""
    assert "--api-keys-file" not in warning_of(ServiceSettings(host=host))  # a worker has none


def test_configured_protection_is_not_in_the_exposure_warning(files):
    tls = {name: files[name] for name in ("tls_cert_file", "tls_key_file")}
    keys = {"api_keys_file": files["api_keys_file"]}
    assert "without TLS" not in warning_of(router(host="0.0.0.0", **tls))
    assert "key or client certificate" in warning_of(router(host="0.0.0.0", **tls))
    assert "key or client certificate" not in warning_of(router(host="0.0.0.0", **keys))
    assert warning_of(router(host="0.0.0.0", **tls, **keys)) == ""
    assert warning_of(router(host="0.0.0.0", **tls, tls_client_ca_file=files["tls_cert_file"])) == ""


@pytest.mark.parametrize("insecure", [False, True])
def test_a_service_logs_the_exposure_warning_once_at_start(caplog, monkeypatch, insecure):
    monkeypatch.setattr(server, "configure_logging", lambda *_, **__: None)  # which takes what is logged from the test

    async def body():
        pass

    assert server.run_service("worker", ServiceSettings(host="0.0.0.0", insecure=insecure), body) == 0
    assert caplog.text.count("beyond this machine") == (not insecure)


@pytest.mark.parametrize(
    ("peer", "is_own"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", True),
        ("unix:", True),
        ("unix:/tmp/s", True),
        ("ipv4:10.0.0.1:4711", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", False),
        ("", False),
        ("vsock:1:2", False),
    ],
)
def test_a_loopback_peer_is_distinguished_from_remote_ones(peer, is_own):
    assert is_own_peer(peer) == is_own


def test_a_host_name_of_loopback_and_other_addresses_is_exposed(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in ("127.0.0.1", "192.0.2.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert not is_own_host("both")
