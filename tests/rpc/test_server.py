"""The bootstrap against real sockets: ready file, health, reflection, TLS, drain, signals, refusals."""

import asyncio
import errno
import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from betoken.common.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    from_rpc_error,
)
from betoken.common.tls import ClientTls
from betoken.rpc import server
from betoken.rpc.link import LinkCallbacks, LinkOptions, LinkServicer, VerifyLink
from betoken.rpc.server import Service, importing, serve
from betoken.rpc.servicing import typed_errors
from betoken.rpc.settings import ServiceSettings
from betoken.v1 import generation_pb2_grpc, verify_pb2_grpc
from betoken.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GenerateTokens,
    TokenizeRequest,
    TokenizeResponse,
)
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.certificates import make_certificate

from .conftest import HELLO, EchoHandler

NAME = "betoken.v1.GenerationService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class SlowServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Tokenize answers when released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.started = asyncio.Event()

    async def Tokenize(self, request, context):
        self.started.set()
        await self.released.wait()
        return TokenizeResponse(ids=[1])


class Running:
    """A server in this event loop, with its port and its stop event."""

    def __init__(self, tasks: asyncio.TaskGroup, settings: ServiceSettings, services=None, **options) -> None:
        self.servicer = SlowServicer()
        self.stop = asyncio.Event()
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        services = services or [Service(NAME, self.servicer, add)]
        self.task = tasks.create_task(
            serve(services, settings, stop=self.stop, on_ready=self._port.set_result, **options)
        )

    async def address(self) -> str:
        return f"127.0.0.1:{await self._port}"


async def tokenize(address: str, timeout_s: float = 30.0):
    async with grpc.aio.insecure_channel(address) as channel:
        return await generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(TokenizeRequest(), timeout=timeout_s)


async def health_of(address: str, name: str = NAME) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)).status


async def test_ready_file_health_and_reflection(tmp_path):
    ready_file = tmp_path / "ready.json"
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(ready_file=ready_file))
        address = await running.address()
        assert json.loads(ready_file.read_text()) == {"port": int(address.rpartition(":")[2]), "pid": os.getpid()}
        assert os.listdir(tmp_path) == ["ready.json"], "written atomically, nothing left behind"
        assert [await health_of(address), await health_of(address, "")] == [SERVING, SERVING]
        async with grpc.aio.insecure_channel(address) as channel:
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=30):
                assert NAME in [service.name for service in answer.list_services_response.service]
        running.stop.set()
    assert not ready_file.exists()


async def test_without_reflection_a_service_is_not_described_and_serves():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(reflection=False))
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await health_of(address) == SERVING
        running.stop.set()


async def test_as_many_calls_as_an_option_may_allow_are_allowed():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(max_concurrent_rpcs=1 << 20))
        assert await health_of(await running.address()) == SERVING
        running.stop.set()


async def test_an_old_connection_gets_no_new_calls_and_keeps_the_others():
    class PeerServicer(SlowServicer):
        def __init__(self):
            super().__init__()
            self.peers = []

        async def Tokenize(self, request, context):
            self.peers.append(context.peer())
            return await super().Tokenize(request, context) if request.prompt else TokenizeResponse()

    servicer = PeerServicer()
    service = Service(NAME, servicer, generation_pb2_grpc.add_GenerationServiceServicer_to_server)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(), [service], max_connection_age_s=0.2)
        async with grpc.aio.insecure_channel(await running.address()) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            slow = stub.Tokenize(TokenizeRequest(prompt="slow"))
            await servicer.started.wait()
            while len(set(servicer.peers)) == 1:
                await stub.Tokenize(TokenizeRequest())
                await asyncio.sleep(0.02)
            servicer.released.set()
            assert (await slow).ids == [1]
        running.stop.set()


async def test_a_service_that_ends_leaves_its_successors_ready_file(tmp_path):
    settings = ServiceSettings(ready_file=tmp_path / "ready.json")
    async with asyncio.TaskGroup() as tasks:
        first = Running(tasks, settings)
        await first.address()
        second = Running(tasks, settings)
        port = int((await second.address()).rpartition(":")[2])
        first.stop.set()
        await first.task
        assert json.loads(settings.ready_file.read_text())["port"] == port
        second.stop.set()
    assert not settings.ready_file.exists()


async def test_a_unix_socket_serves_and_is_replaced(tmp_path):
    host = f"unix:{tmp_path}/service.sock"
    for _ in range(2):  # the second start finds what the first has left
        async with asyncio.TaskGroup() as tasks:
            running = Running(tasks, ServiceSettings(host=host))
            assert (await running.address()).endswith(":0")
            assert stat.S_IMODE(os.stat(tmp_path / "service.sock").st_mode) == 0o600, "its owner's alone"
            assert await health_of(host) == SERVING
            running.stop.set()


async def test_open_calls_finish_and_new_ones_are_refused_while_draining():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=60))
        address = await running.address()
        call = tasks.create_task(tokenize(address))
        await running.servicer.started.wait()
        running.stop.set()
        with pytest.raises(grpc.aio.AioRpcError):  # also of a call that came as it ceased to listen
            async with asyncio.timeout(30):
                while True:
                    await health_of(address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(address)
        assert isinstance(from_rpc_error(caught.value), UnavailableError)
        running.servicer.released.set()
        assert list((await call).ids) == [1]
        async with asyncio.timeout(30):
            await running.task


async def test_a_services_health_follows_whether_it_is_available(monkeypatch):
    monkeypatch.setattr(server, "_HEALTH_PERIOD_S", 0.01)
    is_available = False
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    async with asyncio.TaskGroup() as tasks:
        services = [Service(NAME, SlowServicer(), add, is_available=lambda: is_available)]
        running = Running(tasks, ServiceSettings(), services)
        address = await running.address()
        assert [await health_of(address), await health_of(address, "")] == [NOT_SERVING, SERVING]
        for is_available in (True, False):
            async with asyncio.timeout(30):
                while (await health_of(address) == SERVING) is not is_available:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await health_of(address, "") == SERVING
        running.stop.set()


async def test_health_turns_before_the_drain_and_the_drain_is_bounded():
    draining = asyncio.Event()
    seen: list[float] = []

    async def on_drain(grace_s: float) -> None:
        seen.append(grace_s)
        draining.set()
        await asyncio.sleep(3600)

    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=0.2), on_drain=on_drain)
        address = await running.address()
        running.stop.set()
        await draining.wait()
        assert await health_of(address) == NOT_SERVING
        async with asyncio.timeout(30):
            await running.task
    assert seen == [0.2]


async def test_a_drain_that_sends_away_ends_listening_at_once_and_open_calls_when_they_are_through():
    draining, is_over = asyncio.Event(), asyncio.Event()

    async def on_drain(_grace_s: float) -> None:
        draining.set()
        await is_over.wait()

    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=60), on_drain=on_drain, sends_away=True)
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            open_call = generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(TokenizeRequest(), timeout=30)
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
            assert (await watching.read()).status == SERVING
            await running.servicer.started.wait()
            running.stop.set()
            await draining.wait()
            assert (await watching.read()).status == NOT_SERVING
            refusals = []
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await health_of(address)
                refusals.append(failed.value.code())
            # gRPC cancels what comes in as it ceases to listen, which the SDK takes for a stream that was cut off.
            assert refusals[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert refusals[1] is grpc.StatusCode.UNAVAILABLE
            running.servicer.released.set()
            assert list((await open_call).ids) == [1]
            is_over.set()
            async with asyncio.timeout(30):  # whoever watches its health holds up nothing
                await running.task
            watching.cancel()


async def test_an_idle_link_does_not_hold_up_a_drain():
    handler = EchoHandler()
    servicer = LinkServicer(lambda: HELLO, handler, VerifyLinkResponse)
    service = Service("betoken.v1.VerifyService", servicer, verify_pb2_grpc.add_VerifyServiceServicer_to_server)
    ignore = LinkCallbacks(lambda *_: None, lambda *_: None, lambda *_: None, lambda _: None)
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(drain_grace_s=60), [service], on_drain=servicer.drain)
        link = VerifyLink(await running.address(), ignore)
        await link.connect_once()
        tasks.create_task(link.run())
        running.stop.set()
        async with asyncio.timeout(30):
            await running.task
        await link.close()
    assert handler.closed == [1]


async def test_a_failure_ends_a_drain_too():
    failure = asyncio.get_running_loop().create_future()

    async def on_drain(grace_s: float) -> None:
        failure.set_result(LookupError("lost"))
        await asyncio.sleep(3600)

    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                settings = ServiceSettings(drain_grace_s=60)
                running = Running(tasks, settings, on_drain=on_drain, failure=failure)
                await running.address()
                running.stop.set()
    (error,) = caught.value.exceptions
    assert isinstance(error, InternalError) and str(error) == "LookupError: lost"


async def test_a_port_in_use_is_refused_with_its_address(capfd):
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings())
        port = int((await running.address()).rpartition(":")[2])
        with pytest.raises(FailedPreconditionError, match=f"cannot listen on 127.0.0.1:{port}: it is in use"):
            await serve([], ServiceSettings(port=port), stop=asyncio.Event())
        running.stop.set()
    assert capfd.readouterr().err == "", "gRPC's own line says less"


async def test_a_unix_socket_that_cannot_be_made_is_reported_as_what_it_is(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in (("absent/a.sock", "does not exist"), ("file", "something else than a socket is there")):
        with pytest.raises(FailedPreconditionError, match=reason):
            await serve([], ServiceSettings(host=f"unix:{tmp_path}/{path}"), stop=asyncio.Event())


async def test_a_unix_socket_in_a_folder_that_may_not_be_entered_is_refused(monkeypatch):
    def is_dir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(FailedPreconditionError, match="/closed/a.sock: cannot be looked at: Permission denied"):
        await serve([], ServiceSettings(host="unix:/closed/a.sock"), stop=asyncio.Event())


async def test_a_unix_socket_in_use_is_refused_and_stays_with_its_owner(tmp_path):
    settings = ServiceSettings(host=f"unix:{tmp_path}/service.sock")
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, settings)
        await running.address()
        with pytest.raises(FailedPreconditionError, match=r"cannot listen on unix:.*service\.sock: it is in use"):
            async with asyncio.timeout(30):
                await serve([], settings, stop=asyncio.Event())
        assert await health_of(settings.host) == SERVING
        running.stop.set()


async def test_another_users_unix_socket_is_refused_and_stays(tmp_path, monkeypatch):
    class Refused(socket.socket):
        def connect(self, address):
            raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "service.sock"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        before = path.stat()
        monkeypatch.setattr(socket, "socket", Refused)
        with pytest.raises(FailedPreconditionError, match=r"service\.sock: it is in use"):
            async with asyncio.timeout(10):
                await serve([], ServiceSettings(host=f"unix:{path}"), stop=asyncio.Event())
    assert path.stat() == before


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "this machine has no such address"), ("no.such.name.invalid", "[Nn]ame"), ("a..b", "")],
)
async def test_a_host_that_is_not_this_machines_is_named(host, reason):
    with pytest.raises(FailedPreconditionError, match=f"cannot listen on {host}:0: {reason}"):
        await serve([], ServiceSettings(host=host), stop=asyncio.Event())


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", "[::]"])
async def test_a_host_is_a_name_or_an_address(host):
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(host=host))
        assert int((await running.address()).rpartition(":")[2]) > 0
        running.stop.set()


async def test_an_oversized_message_is_a_typed_error():
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(max_message_bytes=1 << 16))
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                await stub.Tokenize(TokenizeRequest(prompt="x" * 100_000), timeout=30)
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError)
        assert "65536" in str(error)
        running.stop.set()


class TypedServicer(generation_pb2_grpc.GenerationServiceServicer):
    async def Tokenize(self, request, context):
        async with typed_errors(context):
            return TokenizeResponse(ids=[len(request.prompt)])

    async def Generate(self, request, context):
        async with typed_errors(context):
            yield GenerateResponse(tokens=GenerateTokens(text=request.prompt))


@pytest.mark.parametrize(
    ("method", "data", "text"),
    [
        ("Tokenize", b"\x0a\x02\xff\xfe", "prompt = b'\\xff': must be valid UTF-8"),
        ("Generate", b"\x2a\x04\x62\x02\xff\xfe", "sampling.stop[0] = b'\\xff': must be valid UTF-8"),
        ("Generate", b"\x0a\xff", "request = 2 undecodable bytes: must be a betoken.v1.GenerateRequest"),
        pytest.param(  # a look at millions would hold up everyone for seconds
            "Generate",
            b"\x18\x00" * 100_000 + b"\x0a\x01\xff",
            "request = more fields: must be at most 65536 fields, numbers of a list packed",
            id="too-many-fields-to-look-through",
        ),
    ],
)
async def test_undecodable_requests_are_typed_errors_and_disturb_no_other_call(method, data, text):
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(), [Service(NAME, TypedServicer(), add)])
        address = await running.address()
        async with grpc.aio.insecure_channel(address) as channel:
            kind = channel.unary_unary if method == "Tokenize" else channel.unary_stream
            call = kind(f"/{NAME}/{method}", request_serializer=bytes, response_deserializer=bytes)(data, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if method == "Tokenize" else call.read())
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgumentError)
            assert str(error) == text
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert list((await stub.Tokenize(TokenizeRequest(prompt="abc"))).ids) == [3]
            assert [reply.tokens.text async for reply in stub.Generate(GenerateRequest(prompt="a"))] == ["a"]
        running.stop.set()


@pytest.fixture
def certificates(tmp_path) -> Path:
    """server.{pem,key} for localhost, client.{pem,key}, stranger.{pem,key}; each signs itself."""
    for name in ("server", "client", "stranger"):
        make_certificate(tmp_path, name, "localhost")
    return tmp_path


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


async def test_a_router_whose_tls_files_hold_something_else_is_reported(certificates):
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


async def test_a_tls_file_that_is_gone_by_now_is_named(tmp_path):
    for name in ("own.pem", "own.key"):
        (tmp_path / name).touch()
    settings = ServiceSettings(tls_cert_file=tmp_path / "own.pem", tls_key_file=tmp_path / "own.key")
    (tmp_path / "own.key").unlink()
    with pytest.raises(FailedPreconditionError, match=r"own\.key"):
        await serve([], settings, stop=asyncio.Event())


async def test_tls_files_that_hold_something_else_are_suspected(tmp_path):
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


def test_a_full_collection_passes_over_what_was_loaded():
    code = "import gc; from betoken.rpc.server import freeze_loaded; before = len(gc.get_objects()); freeze_loaded(); "
    code += "assert len(gc.get_objects()) < before / 10 and gc.get_freeze_count() > before / 2"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)


def test_imports_are_not_searched_for_garbage_even_where_they_fail():
    before = gc.get_freeze_count()
    kept = []
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        kept.append([])
        import no_such_module  # noqa: F401
    assert gc.isenabled() and gc.get_freeze_count() > before
    assert not any(found is kept for found in gc.get_objects())


PROGRAM = """
import asyncio, sys
from betoken.rpc.server import run_service, serve
from betoken.rpc.servicing import typed_errors
from betoken.rpc.settings import ServiceSettings
async def on_drain(grace_s):
    await asyncio.sleep(float(sys.argv[-1]))
settings = ServiceSettings.parse(sys.argv[1:-1])
sys.exit(run_service("example", settings, lambda: serve([], settings, on_drain=on_drain)))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("drain_s", "signals"), [("0.1", 1), ("300", 2)])
async def test_signals_drain_and_a_second_one_hurries(tmp_path, signum, drain_s, signals):
    ready_file = tmp_path / "ready"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["-c", PROGRAM, "--ready-file", str(ready_file), "--drain-grace-s", "600", drain_s]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            while not ready_file.exists():  # noqa: ASYNC110 (another process makes it)
                await asyncio.sleep(0.02)
            process.send_signal(signum)
            told = b""
            while b"draining" not in told:  # two signals that come together are one
                line = await process.stderr.readline()
                assert line, told
                told += line
            if signals > 1:
                process.send_signal(signum)
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    stderr = told + stderr
    assert process.returncode == 0, stderr.decode()
    assert stdout == b""
    lines = stderr.decode().splitlines()
    assert any(line.endswith("betoken.rpc.server: stopped") for line in lines)
    assert all(" INFO betoken.rpc.server: " in line for line in lines), lines


LOADING = """
import asyncio, signal, sys, threading
import torch
from betoken.rpc.server import run_service
from betoken.rpc.settings import ServiceSettings
def load():
    layer = torch.nn.Linear(64, 64)
    print("loading", flush=True)
    while True:
        layer(torch.ones(2, 64)).sum().backward()
async def body():
    threading.Thread(target=load, daemon=True).start()
    await asyncio.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in a shell's background, which ignores it
sys.exit(run_service("example", ServiceSettings(), body))
"""


async def test_an_interrupt_while_a_model_loads_ends_the_process_in_order():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOADING, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        assert await process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")


IMPORTING = """
import importlib.abc, runpy, signal, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == f"{module}.service":
            print("importing", flush=True)
            time.sleep(600)
module = sys.argv.pop(1)
sys.meta_path.insert(0, Slow())
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in a shell's background, which ignores it
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["betoken.verify_worker", "betoken.draft_worker"])
async def test_an_interrupt_does_not_wait_for_what_a_worker_imports(module):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IMPORTING, module, "--model", "none"]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        assert await process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")


STARTING = """
import sys
from betoken.rpc.server import run_service
from betoken.rpc.settings import ServiceSettings
async def body():
    print("loading")
sys.exit(run_service("example", ServiceSettings.parse(sys.argv[1:]), body))
"""


def test_a_port_in_use_is_refused_before_anything_is_loaded():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-c", STARTING, "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b": it is in use\n" in ended.stderr


def test_another_certificates_key_is_refused_by_name_before_anything_is_loaded(certificates):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    cert, key = certificates / "server.pem", certificates / "client.key"
    command = [sys.executable, "-c", STARTING, "--tls-cert-file", cert, "--tls-key-file", key]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"tls.key_file = {key}"[:80] in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_EXPORTER_OTLP_COMPRESSION", "deflate"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1")]
)
def test_a_bad_setting_of_the_telemetry_sdk_is_refused_in_a_line(variable, value):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), variable: value}
    arguments = [sys.executable, "-c", STARTING, "--otlp-endpoint", "http://127.0.0.1:4317"]
    started = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60)
    assert (started.returncode, started.stdout) == (1, "")
    assert variable in started.stderr and started.stderr.count("\n") == 1
