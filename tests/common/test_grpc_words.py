"""gRPC's error texts are translated to causes, with real sockets; other texts are unchanged."""

import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from betoken.client import BetokenError, Client, ClientTls, RetryPolicy
from betoken.common.errors import DeadlineExceededError, InternalError, UnavailableError
from betoken.common.grpc_words import with_cause
from betoken.common.tls import ServerTls
from tests.certificates import make_certificate

GRPC_WORDS = ("Socket closed", "Method not found", "Stream removed", "last error", "failed to connect", "OPENSSL")


def reported(address: str, tls: ClientTls | None = None) -> str:
    with Client(address, tls=tls, retry=RetryPolicy(max_retries=0), timeout_s=10) as client:
        with pytest.raises(BetokenError, match=f"^(?!.*({'|'.join(GRPC_WORDS)}))") as caught:
            client.model_info()
    return str(caught.value)


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Address of a listener that does something with each connection."""
    sockets: list[socket.socket] = []

    def listen(handle: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    sockets.append(connection)
                    handle(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield listen
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


@pytest.fixture
def plain() -> Iterator[str]:
    """Address of a gRPC server without services."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_an_address_without_a_listener_is_explained(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert reported(address) == f"nothing listens at {address} (connection refused)"
    assert reported(f"unix:{tmp_path}/none.sock") == "the socket does not exist"


def test_an_address_of_another_protocol_is_explained(listening: Callable[..., str], plain: str) -> None:
    assert "knows no such method: it is another service, or one of another version" in reported(plain)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    assert reported(address) == f"what listens at {address} does not speak gRPC"
    server.shutdown()
    server.server_close()
    ssh = listening(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"))
    assert reported(ssh) == f"what listens at {ssh} does not speak gRPC"


def test_an_address_that_closes_connections_is_explained(listening: Callable[..., str]) -> None:
    def reset(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    for handle in (lambda connection: connection.shutdown(socket.SHUT_RDWR), reset):
        assert "ends the connection at once: does it speak TLS" in reported(listening(handle))


def test_a_tls_mismatch_is_explained(tmp_path: Path, plain: str) -> None:
    make_certificate(tmp_path, "a", "localhost")
    make_certificate(tmp_path, "b", "localhost")
    server = grpc.server(ThreadPoolExecutor(2))
    credentials = ServerTls(tmp_path / "a.pem", tmp_path / "a.key").credentials()
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    assert reported(plain, ClientTls(tmp_path / "a.pem")) == f"what listens at {plain} does not speak TLS"
    assert "does it speak TLS" in reported(address)
    other, wrong = (
        ClientTls(tmp_path / "b.pem", server_name="localhost"),
        ClientTls(tmp_path / "a.pem", server_name="x"),
    )
    assert "is not trusted by this side (" in reported(address, other)
    assert reported(address, wrong).endswith("is for another name")
    server.stop(None)


def test_other_error_texts_of_grpc_stay() -> None:
    ours = UnavailableError("worker a: Socket closed", request_id="r1")
    assert str(with_cause(ours)) == "worker a: Socket closed"
    assert str(with_cause(InternalError("Socket closed"))) == "Socket closed"
    assert str(with_cause(DeadlineExceededError("no handshake within 5 s"))) == "no handshake within 5 s"
    assert str(with_cause(UnavailableError("no verify worker"))) == "no verify worker"
