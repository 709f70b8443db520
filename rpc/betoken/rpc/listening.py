"""The listening address of a service, its credentials, and the reason if it cannot listen.

Knows settings and gRPC; knows no service.
"""

import errno
import os
import socket
from pathlib import Path

import grpc

from betoken.common.address import UNIX_PREFIX
from betoken.common.errors import FailedPreconditionError
from betoken.rpc.settings import ServiceSettings

_BIND_REASONS = {errno.EADDRINUSE: "it is in use", errno.EADDRNOTAVAIL: "this machine has no such address"}


def bind(server: grpc.aio.Server, settings: ServiceSettings) -> int:
    """The port that `server` listens on from now on (0: a Unix socket, which its owner alone can open).

    Raises:
        FailedPreconditionError: the address cannot be bound, or a TLS file cannot be read.
        InvalidArgumentError: one is not PEM, or the key is another certificate's.
    """
    check_free(settings)
    address, credentials = _address(settings), credentials_of(settings)
    is_socket = settings.host.startswith(UNIX_PREFIX)
    umask = os.umask(0o177) if is_socket else None
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        return 0 if is_socket else port
    except RuntimeError as error:
        hint = "" if credentials is None else ", or are the TLS files no PEM certificate and its key"
        raise FailedPreconditionError(f"cannot listen on {address}: is it in use{hint}?") from error
    finally:
        if umask is not None:
            os.umask(umask)


def credentials_of(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    """None for plain text.

    Raises:
        FailedPreconditionError: a TLS file cannot be read.
        InvalidArgumentError: one is not PEM, or the key is another certificate's.
    """
    try:
        return settings.server_tls.credentials() if settings.server_tls is not None else None
    except OSError as error:
        raise FailedPreconditionError(f"cannot read a TLS file: {error}") from error


def _address(settings: ServiceSettings) -> str:
    host = settings.host
    if host.startswith(UNIX_PREFIX):
        return host
    return f"[{host}]:{settings.port}" if ":" in host and not host.startswith("[") else f"{host}:{settings.port}"


def check_free(settings: ServiceSettings) -> None:
    """Finds out why an address cannot be listened on, which gRPC reports only in its own log.

    Raises:
        FailedPreconditionError: nothing that the host stands for can be bound, or another process serves there.
    """
    host = settings.host.strip("[]")
    if host.startswith(UNIX_PREFIX):
        try:
            refusal = _why_no_socket(Path(host.removeprefix(UNIX_PREFIX)))
        except OSError as error:  # a folder above may not be entered
            refusal = f"cannot be looked at: {error.strerror}"
        if refusal is not None:
            raise FailedPreconditionError(f"cannot listen on {host}: {refusal}")
        return
    problem: Exception | None = None
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
                return
            except OSError as error:
                problem = problem or error
    except (OSError, UnicodeError) as error:  # no such name
        problem = error
    if isinstance(problem, OSError):
        reason = _BIND_REASONS.get(problem.errno or 0) or problem.strerror
    else:
        reason = str(problem)
    raise FailedPreconditionError(f"cannot listen on {_address(settings)}: {reason}") from problem


def _why_no_socket(path: Path) -> str | None:
    """The reason why a Unix socket cannot be created there; None if it can."""
    if not path.parent.is_dir():
        return f"folder {path.parent} does not exist"
    if not os.access(path.parent, os.W_OK):
        return f"the folder {path.parent} cannot be written"
    if path.exists() and not path.is_socket():
        return "something else than a socket is there"
    return _BIND_REASONS[errno.EADDRINUSE] if _is_answered(str(path)) else None


def _is_answered(path: str) -> bool:
    """Whether a process listens on a Unix socket, which gRPC would take from it, and lose to it when that ends."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # more wait to be taken than its queue holds
            return True
        except PermissionError:  # another user's, who may listen
            return True
        except OSError:  # no listener, or a dead process
            return False
    return True
