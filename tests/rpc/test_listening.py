"""Ports and Unix sockets that a service listens on: rejected with the address and the reason."""

import asyncio
import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from betoken.common.errors import (
    FailedPreconditionError,
)
from betoken.rpc.server import serve
from betoken.rpc.settings import ServiceSettings
from tests.rpc.harness import SERVING, Running, health_of


async def test_a_unix_socket_serves_and_is_replaced(tmp_path):
    host = f"unix:{tmp_path}/service.sock"
    for _ in range(2):  # the second start finds what the first has left
        async with asyncio.TaskGroup() as tasks:
            running = Running(tasks, ServiceSettings(host=host))
            assert (await running.address()).endswith(":0")
            assert stat.S_IMODE(os.stat(tmp_path / "service.sock").st_mode) == 0o600, "its owner's alone"
            assert await health_of(host) == SERVING
            running.stop.set()


async def test_a_port_in_use_is_refused_with_its_address(capfd):
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings())
        port = int((await running.address()).rpartition(":")[2])
        with pytest.raises(FailedPreconditionError, match=f"cannot listen on 127.0.0.1:{port}: it is in use"):
            await serve([], ServiceSettings(port=port), stop=asyncio.Event())
        running.stop.set()
    assert capfd.readouterr().err == "", "gRPC's own line says less"


async def test_a_unix_socket_that_cannot_be_created_is_reported_with_the_reason(tmp_path):
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
async def test_a_host_of_another_machine_is_named(host, reason):
    with pytest.raises(FailedPreconditionError, match=f"cannot listen on {host}:0: {reason}"):
        await serve([], ServiceSettings(host=host), stop=asyncio.Event())


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", "[::]"])
async def test_a_host_is_a_name_or_an_address(host):
    async with asyncio.TaskGroup() as tasks:
        running = Running(tasks, ServiceSettings(host=host))
        assert int((await running.address()).rpartition(":")[2]) > 0
        running.stop.set()
