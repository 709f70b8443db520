"""Addresses that may be dialled, checked before gRPC guesses."""

import re
import socket
from ipaddress import ip_address
from urllib.parse import unquote

UNIX_PREFIX = "unix:"
"""Begins the address of a Unix socket, as gRPC writes it."""
MAX_UNIX_PATH_BYTES = 107  # sockaddr_un holds 108 with the final zero

_HOST = re.compile(r"[\w.-]+|\[[\w.:%-]+\]", re.ASCII)
_PATH = re.compile(r"(?!//(?!/))[^?#\0\ud800-\udfff]+")
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "xds", "google-c2p", "google-c2p-experimental"})


def is_host_port(address: str) -> bool:
    """Whether `address` is HOST:PORT, [HOST]:PORT for IPv6.

    gRPC accepts more: it dials a host without a port at 443, port 65537 at 1, drops the text after `?` or `#`, and
    resolves a URL as a name. A host called as one of its schemes it does not find.
    """
    return address.partition(":")[0].lower() not in _SCHEMES and _has_port(address)


def is_socket(address: str) -> bool:
    """Whether `address` is unix:/PATH.

    gRPC listens at a path with `?`, `#` or a comma, but dials what precedes or follows them; `%41` is an A to it.
    """
    return address.startswith(f"{UNIX_PREFIX}/") and "%" not in address and _is_path(address.removeprefix(UNIX_PREFIX))


def is_own_host(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`: loopback, or a Unix socket."""
    if host.startswith(UNIX_PREFIX):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # no such name: what listens on it will say so
        return False
    return all(ip_address(place.partition("%")[0]).is_loopback for place in found)


def is_own_peer(peer: str) -> bool:
    """Whether a call's peer, as gRPC names it (`ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711`, `unix:`), is a process of
    this machine."""
    scheme, _, place = peer.partition(":")
    if scheme == "unix":
        return True
    try:
        return ip_address(unquote(place).rpartition(":")[0].strip("[]").removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def is_target(address: str) -> bool:
    """Whether `address` is HOST:PORT, or a place under one of gRPC's own schemes, as `dns:///HOST:PORT`."""
    scheme, _, rest = address.partition(":")
    server, place = _parts(rest)
    match scheme:
        case "dns":
            return _has_port(place) and (not server or (_has_port(server) and _ip_version(server) > 0))
        case "ipv4" | "ipv6":
            parts = place.split(",")
            return not server and all(_has_port(part) and _ip_version(part) == int(scheme[-1]) for part in parts)
        case "unix" | "unix-abstract":
            return _is_path(rest)
        case "xds":
            return _PATH.fullmatch(place) is not None
    return is_host_port(address)


def _parts(rest: str) -> tuple[str, str]:
    """SERVER and PLACE of //SERVER/PLACE, as in dns://8.8.8.8:53/HOST:PORT; the server is mostly left empty."""
    if not rest.startswith("//"):
        return "", rest.removeprefix("/")
    server, _, place = rest.removeprefix("//").partition("/")
    return server, place


def _has_port(place: str) -> bool:
    host, _, port = place.rpartition(":")
    return _HOST.fullmatch(host) is not None and port.isascii() and port.isdecimal() and 0 < int(port) < 65536


def _is_path(path: str) -> bool:
    is_one = _PATH.fullmatch(path) is not None and "," not in path
    return is_one and len(path.removeprefix("//").encode()) <= MAX_UNIX_PATH_BYTES


def _ip_version(place: str) -> int:
    """4 or 6 if the host of HOST:PORT is an IP address; 0 for a name."""
    try:
        return ip_address(place.rpartition(":")[0].strip("[]")).version
    except ValueError:
        return 0
