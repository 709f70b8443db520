"""The place at which ranks of several machines meet, seen from this machine. It starts no rank."""

import errno
import ipaddress
import socket

from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

_NAME = "rendezvous"
_CONNECT_TIMEOUT_S = 5.0
_ELSEWHERE = "check the route and the firewall: ranks connect to each other at any port"


def rendezvous_finding(host: str, port: int) -> Finding:
    """Listen at the place if it is of this machine, or else find out whether its machine answers."""
    shown = f"{host}:{port}"
    try:
        address = socket.gethostbyname(host)
    except OSError as fault:
        return error(_NAME, f"{shown}: {fault.strerror or fault}", "name a host or address that all machines know")
    shown += f", {address}" if address != host else ""
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
    except OSError as fault:
        if fault.errno == errno.EADDRNOTAVAIL:
            return _of_other_machine(shown, address, port)
        cure = "end the process that uses the port (`ss -ltnp`), or choose another port on all machines"
        return error(_NAME, f"{shown}: {fault.strerror or fault}", cure)
    if _is_loopback(address):
        cure = "name this machine's address in the private network; /etc/hosts may map its name to loopback"
        return error(_NAME, f"{shown}: other machines cannot reach a loopback address", cure)
    if not _is_own_name(host, address):
        cure = "torchrun: --rdzv-conf is_host=1 on this machine, is_host=0 on the others; or correct /etc/hosts"
        return warning(_NAME, f"{shown}: free, but this machine's name resolves to another address", cure)
    return ok(_NAME, f"{shown}: this machine's, free")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_own_name(host: str, address: str) -> bool:
    """Whether torchrun takes a host for this machine, by its names or their addresses."""
    name = socket.gethostname()
    if host in (name, socket.getfqdn()):
        return True
    try:
        return any(address == each[4][0] for each in socket.getaddrinfo(name, None))
    except OSError:
        return False


def _of_other_machine(shown: str, address: str, port: int) -> Finding:
    try:
        with socket.create_connection((address, port), _CONNECT_TIMEOUT_S) as connection:
            return ok(_NAME, f"{shown}: answers at {connection.getsockname()[0]}")
    except ConnectionRefusedError:
        return ok(_NAME, f"{shown}: its machine answers, and no rank is there yet")
    except OSError as fault:
        reason = "no answer" if isinstance(fault, TimeoutError) else fault.strerror or str(fault)
        return error(_NAME, f"{shown}: {reason}", _ELSEWHERE)
