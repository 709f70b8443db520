"""Addresses that gRPC would interpret differently are rejected."""

import pytest

from betoken.common.address import is_host_port, is_target
from betoken.router.settings import RouterSettings


@pytest.mark.parametrize("address", ["big:50052", "127.0.0.1:1", "[::1]:65535", "a_b.c-d.example.:80"])
def test_an_address_is_a_host_with_a_port(address: str) -> None:
    assert is_host_port(address)
    assert RouterSettings(verify=(address,), tokenizer="t").verify == (address,)


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        ":1",
        "big",
        "big:",
        "big:0",
        "big:65536",
        "big:-1",
        "big:¹",
        "big:x",
        "::1",
        "::1:1",
        "http://big",
        "http://big:1",
        "big#:1",
        "big?x:1",
        "big x:1",
        "\udcff:1",
        "dns:50052",
        "IPv4:1",
        "unix:relative.sock",
        "unix:/run#1/worker.sock",
        f"unix:/{'x' * 107}",
    ],
)
def test_an_address_without_a_host_or_port_is_rejected(address: str) -> None:
    assert not is_host_port(address)
    with pytest.raises(ValueError, match=r"neither HOST:PORT nor unix:/PATH|at least one"):
        RouterSettings(verify=(address,), tokenizer="t")


@pytest.mark.parametrize(
    "address",
    [
        "big:50051",
        "dns:big:1",
        "dns:/big:1",
        "dns:///big:1",
        "dns:///[::1]:1",
        "dns://8.8.8.8:53/big:1",
        "dns://[::1]:53/big:1",
        "dns:///dns:50051",
        "ipv4:10.0.0.7:1,10.0.0.8:1",
        "ipv4:/10.0.0.7:1",
        "ipv4:///10.0.0.7:1",
        "ipv6:[::1]:1,[fe80::1%eth0]:1",
        "unix:/run/router.sock",
        "unix:///run/router.sock",
        f"unix:///{'x' * 106}",
        "unix:/run/my%20router.sock",
        "unix:router.sock",
        "unix-abstract:router",
        "xds:///router",
    ],
)
def test_an_address_may_have_a_scheme_of_grpc(address: str) -> None:
    assert is_target(address)


@pytest.mark.parametrize(
    "address",
    [
        "dns:",
        "dns:///",
        "dns:///big",
        "dns:///big:65537",
        "dns:///big#:1",
        "dns://8.8.8.8",
        "dns://8.8.8.8/big:1",
        "dns://names:53/big:1",
        "dns:big//x/:1",
        "ipv4:",
        "ipv4:big:1",
        "ipv4:10.0.0.7",
        "ipv4:10.0.0.7:1,",
        "ipv4:[::1]:1",
        "ipv4://big/10.0.0.7:1",
        "ipv6:[::1]",
        "unix:",
        "unix://run/router.sock",
        "unix:/run#1/router.sock",
        "unix:/run,1/router.sock",
        f"unix:/{'x' * 107}",
        f"unix:///{'x' * 107}",
        "unix:/\udcff",
        "xds:",
        "google-c2p:1",
    ],
)
def test_an_address_that_its_scheme_does_not_dial_is_rejected(address: str) -> None:
    assert not is_target(address)
