"""What gRPC would dial elsewhere than it says is no address."""

import pytest

from foretoken.router.settings import RouterSettings
from foretoken.rpc.address import is_host_port


@pytest.mark.parametrize("address", ["big:50052", "127.0.0.1:1", "[::1]:65535", "a_b.c-d.example.:80"])
def test_a_host_with_a_port(address: str) -> None:
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
    ],
)
def test_anything_else(address: str) -> None:
    assert not is_host_port(address)
    with pytest.raises(ValueError, match=r"neither HOST:PORT nor unix:/PATH|at least one"):
        RouterSettings(verify=(address,), tokenizer="t")
